"""Ranks on GPUs of their own sum by NCCL, and compute what one rank does. NOT YET RUN ON A GPU."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from pd_serve.clock import MonotonicClock
from pd_serve.config import Config
from pd_serve.engine.batch import Batch, StepResult
from pd_serve.engine.loader import load_runner, plan_engine
from pd_serve.engine.parallel import open_group
from tests.unit.engine.greedy import greedy
from tests.unit.engine.random_models import MODELS, write_random_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks need two GPUs: NCCL takes one each")]
PROMPTS = (tuple(range(3, 40)), tuple(range(90, 60, -1)), tuple(range(7, 96, 4)))
DEADLINE_S = 120.0


def test_two_gpus_give_the_first_tokens_of_one(tmp_path: Path) -> None:
    """Later ones may differ: sums of 16-bit parts round otherwise."""
    folder = write_random_model(tmp_path / "model", **{**MODELS["qwen3"], "head_dim": 64})
    one, two = (_first_tokens(folder, num_ranks, tmp_path / f"meeting-{num_ranks}") for num_ranks in (1, 2))
    assert [token for token, _ in two] == [token for token, _ in one]
    assert [logprob for _, logprob in two] == pytest.approx([logprob for _, logprob in one], abs=0.1)


def _first_tokens(folder: Path, num_ranks: int, meeting: Path) -> list[tuple[int, float]]:
    """Of every prompt, with its log-probability. Every rank runs the batches that rank 0's tokens lead to."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(num_ranks)]
    processes = [context.Process(target=_rank, args=(rank, num_ranks, folder, meeting, pipes[rank][1])) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    followers = [ours for ours, _ in pipes[1:]]
    leader = pipes[0][0]
    while True:
        assert leader.poll(DEADLINE_S), "the first rank does not answer"
        kind, value = leader.recv()
        for follower in followers:
            follower.send((kind, value))
        if kind == "done":
            break
    for process in processes:
        process.join(DEADLINE_S)
    first: list[tuple[int, float]] = value
    return first


def _rank(rank: int, num_ranks: int, folder: Path, meeting: Path, connection: Connection) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    device = torch.device("cuda")
    config = Config.model_validate(
        {"model": {"dtype": "float16"}, "kv": {"block_size": 256, "num_blocks": 16}, "engine": {"device": "cuda", "tp": num_ranks}}
    )
    group = open_group(rank, num_ranks, f"file://{meeting}", device, DEADLINE_S)
    runner = load_runner(plan_engine(folder, config, group), None, MonotonicClock(), group=group)
    if rank:
        while (message := connection.recv())[0] == "batch":
            runner.execute(message[1])
    else:

        def execute(batch: Batch) -> StepResult:
            connection.send(("batch", batch))
            return runner.execute(batch)

        runs = greedy(execute, PROMPTS, 16, chunk=64, block_size=256)
        connection.send(("done", [(tokens[0], logprobs[0].chosen) for tokens, logprobs in runs]))
    group.close()
