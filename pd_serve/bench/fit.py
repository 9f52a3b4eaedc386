"""`pd-serve bench fit`: what steps of a running system take, from outside: through the OpenAI API, the request timeline and, where they can
be reached, the workers' own traces. The coefficients are what `pd-serve plan` simulates with.

    prompts    one at a time, over lengths, with and without a cached prefix: their compute, the hand-over, and the rest of the way
    streams    many at once, all of one prompt length, ending one after the other: the gaps of the longest, by who took part in each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median

import httpx
import msgspec
from pydantic import ValidationError

from pd_serve.bench.arms import Arm, ArmSpec, ClientSettings, opened
from pd_serve.bench.errors import BenchError
from pd_serve.bench.fit_samples import PromptSample, StepSample, StepTimes, fit_prompts, fit_steps, steps_of
from pd_serve.bench.machine import MachineLoad, MachineWatch
from pd_serve.bench.plots_fit import fitted_against_measured
from pd_serve.bench.progress import Bar, Bars
from pd_serve.bench.records import RequestPlan, RequestRecord
from pd_serve.bench.report import write_picture
from pd_serve.bench.results import ArmResult, Described, Result, Scalar, new_result, now_iso, write_records, write_result
from pd_serve.bench.runner import open_loop
from pd_serve.bench.workload import DEFAULT_VOCAB, random_tokens
from pd_serve.protocol.control import (
    REQUESTS_PATH,
    STATUS_PATH,
    WORKER_TRACES_PATH,
    RecentRequests,
    RequestTimeline,
    RouterStatus,
    WorkerStatus,
)
from pd_serve.protocol.link import Role
from pd_serve.protocol.worker_traces import Leg, Told, Transfer, boot_of

DEFAULT_LENGTHS = (33, 64, 100, 180, 257, 300, 384, 430, 500, 512, 900, 1400)
"""Even and odd ones: kernels may round up."""
DEFAULT_CACHED = ((90, 512), (300, 1024))
"""(computed, cached) tokens."""
DEFAULT_STAIRS = (16, 12, 8, 6, 4, 3, 2, 1)
DEFAULT_CONTEXTS = (640, 256, 64)
BUSY_CORES = 0.25
"""Load by others above which coefficients are of that load as much as of the worker."""
_HEAD_TOKENS = 24
"""Tokens that every stream brings before the first of them ends."""
_SETTINGS = {"max_batch_tokens": 512, "max_running": 256, "block_size": 16}
"""Of an endpoint that was there already: its own defaults, where nothing else is said."""


@dataclass(frozen=True, slots=True)
class FitSettings:
    arm: ArmSpec
    client: ClientSettings = field(default_factory=ClientSettings)
    lengths: tuple[int, ...] = DEFAULT_LENGTHS
    cached: tuple[tuple[int, int], ...] = DEFAULT_CACHED
    num_repeats: int = 4
    stairs: tuple[int, ...] = DEFAULT_STAIRS
    """Streams that run together; the first is how many are started, after so many steps each as many are left as the next says."""
    contexts: tuple[int, ...] = DEFAULT_CONTEXTS
    """Prompts of the streams, the longest first: the others are found cached."""
    num_steps: int = 16
    """Of each stair."""
    num_gpus: int = 0
    """Of each worker; 0: its compute threads where they are known, else 1."""
    limit_cores: float = BUSY_CORES
    """Load by others above which nothing is fitted."""
    vocab: int = DEFAULT_VOCAB
    seed: int = 0
    name: str = ""


class WorkerFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker, as status and settings tell of it."""

    role: Role
    num_gpus: int
    num_kv_tokens: int
    kv_bytes_per_token: int
    num_layers: int
    max_batch_tokens: int
    max_running: int


class Fit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    prompts: StepTimes
    steps: StepTimes
    handover_s: float
    request_s: float
    bandwidth_bytes_per_s: float
    """Of the pair; 0.0: it is not known, or there is none."""
    workers: tuple[WorkerFacts, ...]


class FitSamples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measurement of an arm."""

    model: str
    prompts: tuple[PromptSample, ...]
    steps: tuple[StepSample, ...]
    records: tuple[RequestRecord, ...]
    """Of the streams."""
    bandwidth_bytes_per_s: float
    workers: tuple[WorkerFacts, ...]


async def run_fit(settings: FitSettings, path: Path, bars: Bars) -> tuple[Result, Fit]:
    """Measures, and writes the result to `path` with records and picture beside it. Raises BenchError, also when others are busy."""
    started_at = now_iso()
    async with opened([settings.arm], settings.client, bars) as (arm,):
        with MachineWatch(window_s=None) as watch:
            samples = await measure_samples(arm, settings, bars)
        config = arm.config
    _refuse_busy(watch.load, settings)
    fit = fit_samples([samples])
    arms = {settings.arm.name: ArmResult(_figures(fit), write_records(path, settings.arm.name, samples.records), {"model": fit.model})}
    parameters: dict[str, Scalar] = {"lengths": ", ".join(map(str, settings.lengths)), "contexts": ", ".join(map(str, settings.contexts))}
    parameters |= {"stairs": ", ".join(map(str, settings.stairs)), "repeats": settings.num_repeats, "seed": settings.seed}
    result = new_result(Described("fit", settings.name, parameters, config), watch.load, arms, started_at)
    drawn = write_picture(path, "fit", fitted_against_measured({"prompts": fit.prompts.cases, "decode steps": fit.steps.cases}))
    result = msgspec.structs.replace(result, pictures=(drawn,))
    write_result(path, result)
    return result, fit


async def measure_samples(arm: Arm, settings: FitSettings, bars: Bars) -> FitSamples:
    """Of an arm that is open. Raises BenchError."""
    probe = _Probe(arm, settings)
    workers = await probe.workers()
    bar = bars.add("requests", probe.num_requests)
    await probe.warm_up()
    prompts = await probe.prompts(bar)
    steps, records = await probe.streams(bar)
    peers = [peer for worker in (await probe.status()).workers for peer in worker.peers]
    bandwidth = max((peer.bandwidth_bytes_per_s for peer in peers), default=0.0)
    facts = tuple(probe.facts(worker) for worker in workers)
    return FitSamples(arm.endpoint.model, tuple(prompts), tuple(steps), tuple(records), bandwidth, facts)


def fit_samples(measured: Sequence[FitSamples]) -> Fit:
    """Of one arm, measured once or several times: all samples together. Raises BenchError."""
    last = measured[-1]
    budget = next(facts.max_batch_tokens for facts in last.workers if facts.role is not Role.DECODE)
    prompts = [sample for samples in measured for sample in samples.prompts]
    return Fit(
        model=last.model,
        prompts=fit_prompts(prompts, budget),
        steps=fit_steps([sample for samples in measured for sample in samples.steps]),
        handover_s=median(sample.handover_s for sample in prompts),
        request_s=median(sample.request_s for sample in prompts),
        bandwidth_bytes_per_s=last.bandwidth_bytes_per_s,
        workers=last.workers,
    )


class _Probe:
    """Asks one arm."""

    def __init__(self, arm: Arm, settings: FitSettings) -> None:
        self._arm = arm
        self._settings = settings
        self._addresses: tuple[str, ...] = ()
        self._kv_bytes_per_token = 0
        self._num_layers = 1
        self._numbers = count()

    @property
    def num_requests(self) -> int:
        settings = self._settings
        num_streams = 2 * len(settings.contexts) * settings.stairs[0] if settings.stairs else 0
        return settings.num_repeats * (len(settings.lengths) + 2 * len(settings.cached)) + num_streams

    async def status(self) -> RouterStatus:
        """Raises BenchError."""
        try:
            return RouterStatus.model_validate_json(await self._arm.endpoint.text(STATUS_PATH))
        except ValidationError as error:
            raise BenchError(f"{self._arm.endpoint.url} is no router of this version: {error.errors()[0]['msg']}") from error

    async def workers(self) -> tuple[WorkerStatus, ...]:
        """Those that are ready. Raises BenchError unless there is one of each role, or one that has both."""
        ready = tuple(worker for worker in (await self.status()).workers if worker.ready and not worker.draining)
        roles = sorted(worker.role.value for worker in ready)
        if roles not in (["decode", "prefill"], ["both"]):
            raise BenchError(f"one worker of each role is fitted, such as 1p1d or 1c; here are {', '.join(roles) or 'none'}")
        self._addresses = tuple(worker.address for worker in ready)
        return ready

    async def warm_up(self) -> None:
        for length in (min(self._settings.lengths), max(self._settings.lengths)):
            await self._send(self._prompt(length), 4)

    # ---- prompts

    async def prompts(self, bar: Bar) -> list[PromptSample]:
        """Lengths in turn, so that a slow moment is not of one length alone."""
        settings = self._settings
        samples = []
        for _ in range(settings.num_repeats):
            for length in settings.lengths:
                samples.append(await self._sample(self._prompt(length)))
                bar.advance()
            for num_tokens, num_cached in settings.cached:
                prefix = self._prompt(num_cached)
                samples.append(await self._sample(prefix))
                samples.append(await self._sample(prefix + self._prompt(num_tokens)))
                bar.advance()
                bar.advance()
        return samples

    async def _sample(self, prompt: tuple[int, ...]) -> PromptSample:
        record = await self._send(prompt, 2)
        ttft_s = record.token_s[0] - record.sent_s
        num_cached = max(0, record.num_cached_tokens)
        try:
            requests = RecentRequests.model_validate_json(await self._arm.endpoint.text(REQUESTS_PATH)).requests
        except ValidationError as error:
            raise BenchError(f"{self._arm.endpoint.url} tells no timeline of this version: {error.errors()[0]['msg']}") from error
        if not requests or requests[0].prompt_tokens != len(prompt) or not requests[0].attempts:
            raise BenchError("others are sending requests too: coefficients would be of their load")
        compute_s, handover_s = self._parts(requests[0], ttft_s)
        return PromptSample(len(prompt) - num_cached, num_cached, ttft_s, compute_s, handover_s)

    def _parts(self, request: RequestTimeline, ttft_s: float) -> tuple[float, float]:
        """Compute and hand-over: by the workers' traces, or as the router has seen them."""
        attempt = request.attempts[-1]
        legs = self._legs(attempt.attempt_id)
        computing = legs.get(attempt.prefill is not None)
        if computing is not None and computing[1].step_started_s is not None and computing[1].step_ended_s is not None:
            compute_s = computing[1].step_ended_s - computing[1].step_started_s
            if attempt.prefill is None:
                return compute_s, 0.0
            decode = legs.get(False)
            if decode is not None and decode[1].reserved_s is not None and decode[1].record_s is not None and decode[0] == computing[0]:
                reserve_s = decode[1].reserved_s - decode[1].received_s
                return compute_s, reserve_s + max(0.0, decode[1].record_s - computing[1].step_ended_s)
        first_token_s = attempt.first_token_s if attempt.first_token_s is not None else ttft_s
        if attempt.reserved_s is None or attempt.prefilled_s is None:
            return first_token_s - attempt.began_s, 0.0
        return attempt.prefilled_s - attempt.reserved_s, attempt.reserved_s - attempt.began_s + max(
            0.0, first_token_s - attempt.prefilled_s
        )

    def _legs(self, attempt_id: int) -> dict[bool, tuple[str, Leg]]:
        """(host, leg) by whether it is that of prefill; empty where the workers cannot be asked."""
        legs: dict[bool, tuple[str, Leg]] = {}
        for address in self._addresses:
            try:
                reply = httpx.get(f"{address}{WORKER_TRACES_PATH}?limit=8", timeout=10, trust_env=False).raise_for_status()
                told = msgspec.json.decode(reply.content, type=Told)
            except (httpx.HTTPError, msgspec.DecodeError):
                continue
            for is_prefill in (True, False):
                if (leg := told.leg(attempt_id, is_prefill)) is not None:
                    legs[is_prefill] = (boot_of(told.host), leg)
            if (transfer := told.transfer(attempt_id)) is not None and transfer.layers and transfer.num_tokens:
                self._learn(transfer)
        return legs

    def _learn(self, transfer: Transfer) -> None:
        """What a token of KV is. A prompt of which decode has a part brings less: the most is of one that came whole."""
        nbytes = sum(layer.nbytes for layer in transfer.layers) // transfer.num_tokens
        self._kv_bytes_per_token = max(self._kv_bytes_per_token, nbytes)
        self._num_layers = max(self._num_layers, 1 + max(layer.layer for layer in transfer.layers))

    # ---- streams

    async def streams(self, bar: Bar) -> tuple[list[StepSample], list[RequestRecord]]:
        """Prompts are computed before, one after the other: what the streams then compute of them is a step's."""
        settings = self._settings
        longest = [self._prompt(max(settings.contexts)) for _ in range(settings.stairs[0])]
        samples: list[StepSample] = []
        records: list[RequestRecord] = []
        for context in sorted(settings.contexts, reverse=True):
            prompts = [prompt[:context] for prompt in longest]
            for prompt in prompts:
                await self._send(prompt, 1)
                bar.advance()
            plans = [RequestPlan(index, "stream", 0.0, prompt, self._num_output(index)) for index, prompt in enumerate(prompts)]
            found = await open_loop(self._arm.endpoint, plans, bar.advance)
            if failed := next((record.error for record in found if not record.ok), ""):
                raise BenchError(f"a stream failed: {failed}")
            samples += steps_of(found)
            records += found
        return samples, records

    def _num_output(self, index: int) -> int:
        """So that after each stair as many are left as the next one says."""
        num_stairs = sum(index < stair for stair in self._settings.stairs)
        return _HEAD_TOKENS + num_stairs * self._settings.num_steps

    # ---- facts

    def facts(self, worker: WorkerStatus) -> WorkerFacts:
        config = self._config(worker.role)

        def setting(section: str, name: str) -> int:
            return int(config.get(f"{section}.{name}", _SETTINGS.get(name, 0)) or _SETTINGS.get(name, 0))

        num_kv_tokens = worker.blocks.total * setting("kv", "block_size")
        kv_bytes = self._kv_bytes_per_token or int(config.get("kv.memory_bytes", 0)) // max(1, num_kv_tokens)
        return WorkerFacts(
            role=worker.role,
            num_gpus=self._settings.num_gpus or int(config.get("engine.threads", 0)) or 1,
            num_kv_tokens=num_kv_tokens,
            kv_bytes_per_token=max(1, kv_bytes),
            num_layers=self._num_layers,
            max_batch_tokens=setting("engine", "max_batch_tokens"),
            max_running=setting("engine", "max_running"),
        )

    def _config(self, role: Role) -> dict[str, Scalar]:
        """Empty for a worker that was there already."""
        if self._arm.cluster is None:
            return {}
        name = "colocated" if role is Role.BOTH else role.value
        return self._arm.cluster.config.get(self._arm.cluster.process(name).name, {})

    # ---- requests

    def _prompt(self, length: int) -> tuple[int, ...]:
        """Of its own."""
        return random_tokens(length, self._settings.vocab, (self._settings.seed, 11, next(self._numbers)))

    async def _send(self, prompt: tuple[int, ...], num_output: int) -> RequestRecord:
        """Raises BenchError when it fails."""
        (record,) = await open_loop(self._arm.endpoint, [RequestPlan(0, "prompt", 0.0, prompt, num_output)])
        if not record.ok or not record.token_s:
            raise BenchError(f"a request of {len(prompt)} tokens failed: {record.error or 'it brought no token'}")
        return record


def _refuse_busy(load: MachineLoad, settings: FitSettings) -> None:
    taken = load.others_cores + load.steal_cores
    if taken > settings.limit_cores:
        raise BenchError(
            f"others took {taken:.2f} of {load.cores} cores meanwhile, so the coefficients would be theirs as well: wait until the machine "
            f"is quiet, or allow it with --limit {taken:.1f}"
        )


def _figures(fit: Fit) -> dict[str, float]:
    figures = {f"prefill_{name}_s": value for name, value in zip("abc", fit.prompts.fitted.coefficients, strict=False)}
    if fit.prompts.call_sizes:
        figures |= {"prefill_call_s": fit.prompts.fitted.coefficients[3], "prefill_largest_call": float(fit.prompts.call_sizes[0])}
    figures |= {f"decode_{name}_s": value for name, value in zip("abc", fit.steps.fitted.coefficients, strict=True)}
    for name, times in (("prefill", fit.prompts), ("decode", fit.steps)):
        figures[f"{name}_r2"] = times.fitted.r2
        figures[f"{name}_worst_residual_share"] = times.fitted.worst
        for share in (0.1, 0.5, 0.9, 0.99):
            figures[f"{name}_noise_ratio.p{round(100 * share)}"] = times.noise[round(share * (len(times.noise) - 1))]
    figures |= {"handover_s": fit.handover_s, "request_s": fit.request_s}
    if fit.bandwidth_bytes_per_s:
        figures["bandwidth_bytes_per_s"] = fit.bandwidth_bytes_per_s
    return figures
