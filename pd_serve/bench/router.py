"""`pd-serve bench router`: what the router costs, before workers that answer at once, beside a direct way and other routers.

    requests   whole answers, asked for again as soon as they come, at each concurrency
    streams    the same as streams of instant tokens
    paced      many streams at once, a token of each every interval: gaps, and CPU time per token
    growth     CPU time per token with few and many streams, with one worker and several; memory with many open

Client, router and mock share the machine, so that throughput is a race for its cores: CPU time of the router by request and by token, which
stands beside it, says more. Arms take turns within each round. A ratio is of an arm to `direct` in the same run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import msgspec
import uvloop

from pd_serve.bench.errors import BenchError
from pd_serve.bench.machine import MachineWatch
from pd_serve.bench.progress import Bars
from pd_serve.bench.raw_client import Answer, ask_for, request_bytes, stream_all
from pd_serve.bench.results import ArmResult, Described, Result, new_result, now_iso, write_result
from pd_serve.bench.router_stand import DIRECT, ROUTER, Arm, Stand, StandSpec
from pd_serve.bench.statistics import percentile

PROMPT = "Hello there, how are you today? I would like to know something about the history of the lighthouse."
SETTLE_TOKENS = 20
"""Of each paced stream, left out: streams are still being opened."""
PATH = "/v1/completions"


class RouterOptions(msgspec.Struct, frozen=True):
    parts: tuple[str, ...] = ("requests", "streams", "paced", "growth")
    model: str = "demo"
    """Whose tokenizer the router uses."""
    processes: int = 1
    """Of the router."""
    peers: Mapping[str, str] = {}
    """Commands of other routers, with {port} and {upstream}."""
    concurrency: tuple[int, ...] = (1, 32, 256)
    seconds: float = 1.0
    """Of each arm in each round."""
    rounds: int = 2
    answer_tokens: int = 16
    stream_tokens: int = 64
    num_streams: int = 1000
    interval_s: float = 0.02
    paced_tokens: int = 150
    num_workers: int = 16
    """Of the growth part's second look."""
    num_open: int = 2000
    """Streams held open to look at memory."""


class _Taken(msgspec.Struct):
    """What an arm was measured to do, over all rounds."""

    answers: list[Answer] = []
    seconds: float = 0.0
    cpu_s: float = 0.0


def run_router(options: RouterOptions, name: str, path: Path, bars: Bars) -> Result:
    """Raises BenchError."""
    unknown = set(options.parts) - set(_PARTS)
    if unknown:
        raise BenchError(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(_PARTS)}")
    began_at = now_iso()
    figures: dict[str, dict[str, float]] = {}
    with MachineWatch() as watch:
        for part in options.parts:
            _PARTS[part](options, figures, bars)
    _add_ratios(figures)
    parameters = {key: value for key, value in msgspec.structs.asdict(options).items() if isinstance(value, int | float | str)}
    described = Described(kind="router", name=name, parameters=parameters | {"parts": ",".join(options.parts)})
    result = new_result(described, watch.load, {arm: ArmResult(found) for arm, found in figures.items()}, began_at)
    write_result(path, result)
    return result


# ---- parts


def _requests(options: RouterOptions, figures: dict[str, dict[str, float]], bars: Bars) -> None:
    _closed_loops("requests", options, {"max_tokens": options.answer_tokens}, figures, bars)


def _streams(options: RouterOptions, figures: dict[str, dict[str, float]], bars: Bars) -> None:
    _closed_loops("streams", options, {"max_tokens": options.stream_tokens, "stream": True}, figures, bars)


def _closed_loops(
    what: str, options: RouterOptions, wanted: Mapping[str, object], figures: dict[str, dict[str, float]], bars: Bars
) -> None:
    with Stand(StandSpec(model=options.model, processes=options.processes, peers=options.peers)) as stand:
        bar = bars.add(what, options.rounds * len(options.concurrency) * len(stand.arms))
        taken: dict[tuple[str, int], _Taken] = {}
        for turn in range(options.rounds):
            for concurrency in options.concurrency:
                arms = list(stand.arms.values())
                for arm in arms if turn % 2 == 0 else reversed(arms):
                    _loop(arm, wanted, concurrency, options.seconds, taken.setdefault((arm.name, concurrency), _Taken()))
                    bar.advance()
    for (arm_name, concurrency), found in taken.items():
        figures.setdefault(arm_name, {}).update(_loop_figures(f"{what}_c{concurrency}", found))


def _loop(arm: Arm, wanted: Mapping[str, object], concurrency: int, seconds: float, taken: _Taken) -> None:
    request = _request(arm, wanted)
    cpu_s, began = arm.cpu_s(), time.perf_counter()
    taken.answers += uvloop.run(ask_for(arm.port, request, concurrency, seconds))
    taken.seconds += time.perf_counter() - began
    taken.cpu_s += arm.cpu_s() - cpu_s


def _paced(options: RouterOptions, figures: dict[str, dict[str, float]], bars: Bars) -> None:
    spec = StandSpec(model=options.model, processes=options.processes, peers=options.peers, interval_s=options.interval_s)
    with Stand(spec) as stand:
        bar = bars.add("paced", len(stand.arms))
        for arm in stand.arms.values():
            figures.setdefault(arm.name, {}).update(
                _paced_figures("paced", _stream_together(arm, options.num_streams, options.paced_tokens))
            )
            bar.advance()


def _growth(options: RouterOptions, figures: dict[str, dict[str, float]], bars: Bars) -> None:
    """CPU time per token: one worker and few streams, one and many, several and many; then memory while many are open."""
    many, few = options.num_streams, max(1, options.num_streams // 10)
    bar = bars.add("growth", 4)
    router = figures.setdefault(ROUTER, {})
    for num_workers, numbers in ((1, (few, many)), (options.num_workers, (many,))):
        spec = StandSpec(model=options.model, processes=options.processes, num_workers=num_workers, interval_s=options.interval_s)
        with Stand(spec) as stand:
            for number in numbers:
                taken = _stream_together(stand.arms[ROUTER], number, options.paced_tokens)
                router[f"growth_cpu_s.per_token_{number}_streams_{num_workers}_workers"] = _by(taken.cpu_s, _num_events(taken))
                bar.advance()
    with Stand(StandSpec(model=options.model, processes=options.processes, interval_s=5 * options.interval_s)) as stand:
        arm = stand.arms[ROUTER]
        for turn in ("first", "second"):
            _stream_together(arm, options.num_open, 20)
            router[f"open_{options.num_open}_rss_bytes.after_{turn}"] = arm.rss_bytes()
        bar.advance()


_PARTS = {"requests": _requests, "streams": _streams, "paced": _paced, "growth": _growth}


# ---- figures


def _stream_together(arm: Arm, num_streams: int, num_tokens: int) -> _Taken:
    request = _request(arm, {"max_tokens": num_tokens, "stream": True})
    cpu_s, began = arm.cpu_s(), time.perf_counter()
    answers = uvloop.run(stream_all(arm.port, [request] * num_streams))
    return _Taken(answers, time.perf_counter() - began, arm.cpu_s() - cpu_s)


def _request(arm: Arm, wanted: Mapping[str, object]) -> bytes:
    body = {"model": arm.model, "prompt": PROMPT, "temperature": 0, **wanted}
    return request_bytes(PATH, json.dumps(body).encode())


def _loop_figures(name: str, taken: _Taken) -> dict[str, float]:
    whole = [answer for answer in taken.answers if not answer.error]
    return {
        f"{name}_per_s": len(whole) / taken.seconds,
        f"{name}_latency_s.p50": percentile([answer.done_s - answer.sent_s for answer in whole], 50),
        f"{name}_latency_s.p99": percentile([answer.done_s - answer.sent_s for answer in whole], 99),
        f"{name}_cpu_s.per_request": _by(taken.cpu_s, len(whole)),
        f"{name}_failed": len(taken.answers) - len(whole),
    }


def _paced_figures(name: str, taken: _Taken) -> dict[str, float]:
    gaps = [after - before for answer in taken.answers for before, after in pairwise(answer.event_s[SETTLE_TOKENS:])]
    return {
        **{f"{name}_gap_s.{label}": percentile(gaps, q) for label, q in (("p50", 50), ("p99", 99), ("p999", 99.9), ("max", 100))},
        f"{name}_cpu_s.per_token": _by(taken.cpu_s, _num_events(taken)),
        f"{name}_failed": sum(bool(answer.error) for answer in taken.answers),
    }


def _num_events(taken: _Taken) -> int:
    return sum(len(answer.event_s) for answer in taken.answers)


def _by(seconds: float, count: int) -> float:
    return seconds / count if count else 0.0


def _add_ratios(figures: dict[str, dict[str, float]]) -> None:
    """Of rates to direct's, and what was added to its medians and gaps."""
    direct = figures.get(DIRECT, {})
    for arm_name, found in figures.items():
        if arm_name == DIRECT:
            continue
        for key in list(found):
            if key.endswith("_per_s") and direct.get(key):
                found[key.replace("_per_s", "_of_direct_ratio")] = found[key] / direct[key]
            elif ("_latency_s." in key or "_gap_s." in key) and key in direct:
                found[key.replace("_s.", "_added_s.")] = found[key] - direct[key]
