"""`pd-serve bench handover`: where the time of a disaggregated request goes, phase by phase and layer by layer (passage.py).

Requests are sent one at a time, to a cluster of one prefill and one decode worker with cores of their own; beside it, in turn, to a
colocated worker on the cores of prefill, which shows what the same prompt takes without a transfer. Needs one host: moments of client,
router and workers are compared on its monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import msgspec
import numpy as np
from pydantic import ValidationError

from pd_serve.bench.arms import Arm, ArmSpec, ClientSettings, opened
from pd_serve.bench.cluster import ClusterSpec
from pd_serve.bench.cores import CoreShare
from pd_serve.bench.errors import BenchError
from pd_serve.bench.machine import MachineWatch
from pd_serve.bench.passage import Passage, figures_of, median_phases, passages_of, typical
from pd_serve.bench.plots_handover import layers, medians, waterfall
from pd_serve.bench.progress import Bars
from pd_serve.bench.records import RequestPlan, RequestRecord
from pd_serve.bench.report import write_picture
from pd_serve.bench.results import ArmResult, Described, Result, Scalar, new_result, now_iso, write_records, write_result
from pd_serve.bench.statistics import percentile, ttft
from pd_serve.protocol.control import REQUESTS_PATH, WORKER_TRACES_PATH, RecentRequests
from pd_serve.protocol.worker_traces import Told

DISAGGREGATED, ALONE = "disaggregated", "colocated"
DEFAULT_LENGTHS = (128, 512, 2048)
MAX_REQUESTS = 240
"""To the disaggregated arm: the router remembers 256."""
_WORDS = (
    "the of and to in is it that was for on are as with his they at be this from have or by one had not but what all were when we there "
    "an your which their said if do will each about how up out them then she many some so these would other into has more her two like "
    "see time could no make than first been its who now people my made over did down only way find use may water long little very after"
)
"""Each with the blank before it one token in the usual vocabularies."""


@dataclass(frozen=True, slots=True)
class HandoverSettings:
    lengths: tuple[int, ...] = DEFAULT_LENGTHS
    """Words of the prompts, which is nearly their length in tokens."""
    num_requests: int = 12
    """At each length, on each arm."""
    output_tokens: int = 4
    cores: CoreShare | None = None
    """None: not pinned."""
    base: ClusterSpec = field(default_factory=ClusterSpec)
    has_colocated: bool = True
    seed: int = 0
    name: str = ""

    def specs(self) -> list[ArmSpec]:
        traced = {"observe.trace_requests": "1024", **self.base.settings}
        apart = {} if self.cores is None else self.cores.apart()
        specs = [ArmSpec(DISAGGREGATED, cluster=replace(self.base, prefill=1, decode=1, settings={**apart, **traced}))]
        if self.has_colocated:
            alone = {} if self.cores is None else self.cores.alone()
            specs.append(ArmSpec(ALONE, cluster=replace(self.base, colocated=1, settings={**alone, **traced})))
        return specs


async def run_handover(settings: HandoverSettings, path: Path, bars: Bars) -> Result:
    """Measures, and writes the result to `path` with its records beside it. Raises BenchError."""
    if (settings.num_requests + 1) * len(settings.lengths) > MAX_REQUESTS:
        raise BenchError(f"at most {MAX_REQUESTS} requests in all: the router does not remember more")
    started_at = now_iso()
    async with opened(settings.specs(), ClientSettings(), bars) as arms:
        bar = bars.add("requests", settings.num_requests + 1)
        await _turn(arms, settings, 0)
        bar.advance()
        records: dict[tuple[str, int], list[tuple[float, RequestRecord]]] = {}
        with MachineWatch() as watch:
            for turn in range(1, settings.num_requests + 1):
                for key, sent in (await _turn(arms, settings, turn)).items():
                    records.setdefault(key, []).append(sent)
                bar.advance()
        requests, told = _ask(arms[0])
        config = {process: values for arm in arms for process, values in arm.config.items()}
    passages = {length: passages_of(records[DISAGGREGATED, length], requests.requests, told) for length in settings.lengths}
    if missing := [length for length, found in passages.items() if not found]:
        raise BenchError(f"no request of {missing[0]} tokens went by way of both workers: is it prefilled where it decodes?")
    results = {f"{DISAGGREGATED} {length}": ArmResult(figures_of(found)) for length, found in passages.items()}
    for (name, length), found in records.items():
        label = f"{name} {length}"
        only = [record for _, record in found]
        figures = results[label].figures if label in results else {}
        waited = ttft(only)
        first = {"ttft_s.p50": percentile(waited, 50), "ttft_s.max": max(waited)}
        file = write_records(path, label.replace(" ", "-"), only)
        results[label] = ArmResult({**first, **figures}, file, {"arm": name, "length": length})
    _compare(results, settings)
    parameters: dict[str, Scalar] = {
        "lengths": ", ".join(map(str, settings.lengths)),
        "requests": settings.num_requests,
        "output_tokens": settings.output_tokens,
    }
    described = Described("handover", settings.name, parameters, config)
    result = msgspec.structs.replace(new_result(described, watch.load, results, started_at), pictures=_draw(path, passages))
    write_result(path, result)
    return result


def text_of(num_words: int, seed: Sequence[int]) -> str:
    """Words in random order: text, so that the tokenizer has its work, and new each time."""
    words = _WORDS.split()
    return " ".join(words[index] for index in np.random.default_rng(list(seed)).integers(0, len(words), num_words))


async def _turn(arms: Sequence[Arm], settings: HandoverSettings, turn: int) -> dict[tuple[str, int], tuple[float, RequestRecord]]:
    """A request of every length to every arm, by arm and length; prompts are those of the turn."""
    order = arms if turn % 2 == 0 else tuple(reversed(arms))
    return {(arm.name, length): await _send(arm, settings, length, turn) for arm in order for length in settings.lengths}


async def _send(arm: Arm, settings: HandoverSettings, length: int, turn: int) -> tuple[float, RequestRecord]:
    """(start, record). Raises BenchError when it fails."""
    plan = RequestPlan(turn, str(length), 0.0, text_of(length, (settings.seed, length, turn)), settings.output_tokens)
    start = time.monotonic()
    record = await arm.endpoint.stream(plan, start)
    if not record.ok:
        raise BenchError(f"{arm.name}: a request of {length} tokens failed: {record.error}")
    return start, record


def _ask(arm: Arm) -> tuple[RecentRequests, list[Told]]:
    """The router's timeline and its workers' traces. Raises BenchError."""
    cluster = arm.cluster
    assert cluster is not None
    try:
        requests = RecentRequests.model_validate_json(_get(cluster.url + REQUESTS_PATH))
        addresses = [cluster.process(role).address for role in ("prefill", "decode")]
        told = [msgspec.json.decode(_get(f"{address}{WORKER_TRACES_PATH}?limit=1024"), type=Told) for address in addresses]
    except (httpx.HTTPError, ValidationError, msgspec.DecodeError) as error:
        raise BenchError(f"cannot read what router and workers noted: {error}") from error
    return requests, told


def _get(url: str) -> bytes:
    return httpx.get(url, timeout=10, trust_env=False).raise_for_status().content


def _compare(results: dict[str, ArmResult], settings: HandoverSettings) -> None:
    """TTFT of each length as a ratio to the colocated one's."""
    for length in settings.lengths:
        mine, other = results[f"{DISAGGREGATED} {length}"], results.get(f"{ALONE} {length}")
        if other is not None and other.figures.get("ttft_s.p50"):
            mine.figures["ttft_ratio.p50"] = mine.figures["ttft_s.p50"] / other.figures["ttft_s.p50"]


def _draw(path: Path, passages: Mapping[int, Sequence[Passage]]) -> tuple[str, ...]:
    """Names of the files beside the result. Raises BenchError."""
    drawn = {"phases": medians({str(length): median_phases(found) for length, found in passages.items()}, "Phases of a request, medians")}
    for length, found in passages.items():
        one = typical(found)
        title = f"A request of {one.num_tokens} tokens: TTFT {1e3 * one.ttft_s:.1f} ms, handed over in {1e3 * one.handover_s:.2f} ms"
        drawn[f"way-{length}"] = waterfall(one, title)
        share = f"{one.transfer.overlap_ratio:.1%} of its KV over {one.transfer.lane} before the end of compute"
        drawn[f"layers-{length}"] = layers(one.transfer, f"The same, layer by layer: {share}")
    return tuple(write_picture(path, name, data) for name, data in drawn.items())
