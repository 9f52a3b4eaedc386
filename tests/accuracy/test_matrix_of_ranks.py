"""The matrix for workers of several ranks: degrees beside block sizes and orders, as real rank processes over ucx.

Every worker plays both parts, so each set gives all its ordered pairs. All in float32: the tokens are those that one rank computes alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from tests.accuracy.test_matrix import FAMILIES, config_of
from tests.e2e.test_tensor_parallel import check_pair
from tests.fakes import write_tokenizer
from tests.rank_driver import join
from tests.worker_of_ranks import WorkerOfRanks

SETS: dict[str, dict[str, tuple[int, int, str]]] = {
    "two": {"one": (1, 8, "token_major"), "two": (2, 16, "head_major"), "also-two": (2, 64, "token_major")},
    "four": {"one": (1, 64, "head_major"), "two": (2, 8, "token_major"), "four": (4, 16, "head_major")},
}
"""{worker: (degree, block size, order)}"""


@contextmanager
def started(folder: Path, family: str, kinds: dict[str, tuple[int, int, str]]) -> Iterator[dict[str, WorkerOfRanks]]:
    model = write_tokenizer(folder / "model")
    (model / "config.json").write_text(json.dumps(config_of(family, vocab_size=300)))
    sections: dict[str, Any] = {"model": {"id": str(model), "load_format": "random", "dtype": "float32"}, "transport": {"verify": True}}
    workers: dict[str, WorkerOfRanks] = {}
    try:
        for name, (degree, block_size, order) in kinds.items():
            kv = {"block_size": block_size, "num_blocks": 2048 // block_size, "order": order}
            workers[name] = WorkerOfRanks(folder, name, degree, **sections, kv=kv)
        for worker in workers.values():
            worker.driver.wait_ready()
        join(*(worker.driver for worker in workers.values()))
        for worker in workers.values():
            worker.driver.timeout_s = 30.0
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


def check_set(folder: Path, family: str, kinds: dict[str, tuple[int, int, str]]) -> None:
    with started(folder, family, kinds) as workers:
        for salt, (prefill, decode) in enumerate(permutations(workers, 2)):
            # Not by a worker that takes part: it would find the prompt in its cache.
            (alone,) = [worker for name, worker in workers.items() if name not in (prefill, decode)]
            check_pair(workers[prefill], workers[decode], alone, salt=1000 * salt)


def test_every_pair_of_a_set_gives_the_tokens_of_a_third(tmp_path: Path) -> None:
    check_set(tmp_path, "llama", SETS["two"])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SETS)
def test_every_pair_of_every_family(name: str, family: str, tmp_path: Path) -> None:
    check_set(tmp_path, family, SETS[name])
