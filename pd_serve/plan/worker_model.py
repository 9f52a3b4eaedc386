"""How long a worker's steps take, as a few coefficients; what the simulator has for an engine. Pure.

Written by `pd-serve bench fit` (fitted.py) or made from published peaks (modelled.py), read by `pd-serve plan`. Form of the
two costs: DistServe (OSDI'24, appendix A) and Splitwise (ISCA'24, figure 8) find prompts linear in their tokens with a quadratic part from
attention, and decode steps linear in batch and in the tokens that attention reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from pd_serve.bench.fit_samples import calls_of
from pd_serve.plan.errors import PlanError

_COUNTS = ("num_gpus", "num_kv_tokens", "kv_bytes_per_token", "num_layers", "max_batch_tokens", "max_running")
_SECONDS = ("handover_s", "request_s", "step_gap_s", "prefill_call_s")
_QUANTILES = ("prefill_noise", "decode_noise")


class WorkerModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Coefficients of one worker in both roles. Raises PlanError on construction for values that no worker has."""

    name: str
    """Such as "SmolLM2-135M on 1 core", or "Llama-3.1-8B, H100 x1 (published peaks at 50 %)"."""
    num_gpus: int
    """Or cores: what goodput is divided by."""
    prefill: tuple[float, float, float]
    """a, b, c: a step that computes chunks of n tokens, each behind p tokens that are in the cache, takes a + b sum(n) + c sum(n (n + 2 p))
    seconds, so that the last terms of a prompt's chunks add up to c (sum n)^2."""
    decode: tuple[float, float, float]
    """a, b, c: one step of `batch` sequences with `context` tokens in all takes a + b context + c batch seconds."""
    prefill_calls: tuple[int, ...] = ()
    """Some kernels take rows in calls of these sizes only, descending: the tokens of a step go into as few of them as fit, what is left
    over into one more of the smallest. Empty: any number at once."""
    prefill_call_s: float = 0.0
    """Each of them, beyond its tokens: it reads the weights."""
    num_kv_tokens: int
    """What the pool holds."""
    kv_bytes_per_token: int
    num_layers: int
    max_batch_tokens: int = 2048
    """Of a step that computes prompts."""
    max_running: int = 256
    handover_s: float
    """What a hand-over takes beyond the transfer of what was computed last: reserve, first push, notice; not hidden by compute."""
    request_s: float = 0.0
    """What a request takes outside of workers' steps and the hand-over: client to router to worker, and its first token back."""
    step_gap_s: float = 0.0
    """Between two steps of an engine that has more to do, where `prefill` and `decode` are of steps alone; as fitted, it is in them."""
    prefill_noise: tuple[float, ...] = ()
    """Measured by fitted time of steps: quantiles at even distances from the least to the most, to draw from. Empty: as fitted."""
    decode_noise: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for field in ("prefill", "decode"):
            coefficients = getattr(self, field)
            if not all(0 <= value < math.inf for value in coefficients) or not any(coefficients):
                raise PlanError(f"worker model {self.name!r}: {field} {coefficients}: coefficients are seconds from 0 up, not all 0")
        for field in _COUNTS:
            if getattr(self, field) < 1:
                raise PlanError(f"worker model {self.name!r}: {field} is at least 1, not {getattr(self, field)}")
        for field in _SECONDS:
            if not 0 <= getattr(self, field) < math.inf:
                raise PlanError(f"worker model {self.name!r}: {field} is seconds from 0 up, not {getattr(self, field)}")
        if list(self.prefill_calls) != sorted(self.prefill_calls, reverse=True) or min(self.prefill_calls, default=1) < 1:
            raise PlanError(f"worker model {self.name!r}: prefill_calls are sizes of at least 1 in descending order")
        for field in _QUANTILES:
            quantiles = getattr(self, field)
            if quantiles and (list(quantiles) != sorted(quantiles) or not 0 < quantiles[0] <= quantiles[-1] < math.inf):
                raise PlanError(f"worker model {self.name!r}: {field} is ratios above 0 in ascending order")

    # ---- time

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """One step of chunks (n tokens, behind p cached ones); 0.0 without any."""
        return self.prefill[0] + self._prompts_s(chunks) if chunks else 0.0

    def decode_s(self, batch: int, context: int) -> float:
        """One step, a token for each of `batch` sequences that have `context` tokens in all; 0.0 without any."""
        if not batch:
            return 0.0
        a, b, c = self.decode
        return a + b * context + c * batch

    def decode_run_s(self, batch: int, context: int, num_steps: int) -> float:
        """So many steps of an unchanged batch one after the other: each makes the next one's context `batch` tokens longer."""
        if not batch:
            return 0.0
        a, b, c = self.decode
        return num_steps * (a + b * context + c * batch) + b * batch * num_steps * (num_steps - 1) / 2

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch: int, context: int) -> float:
        """A colocated worker's step that does both: the weights are read once for all (the larger `a`), the rest adds up."""
        if not chunks:
            return self.decode_s(batch, context)
        if not batch:
            return self.prefill_s(chunks)
        fixed, per_context, per_sequence = self.decode
        return max(self.prefill[0], fixed) + self._prompts_s(chunks) + per_context * context + per_sequence * batch

    def _prompts_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Of a step, without its fixed part."""
        num_tokens = num_pairs = 0
        for count, cached in chunks:
            num_tokens += count
            num_pairs += count * (count + 2 * cached)
        num_calls, num_rows = calls_of(num_tokens, self.prefill_calls)
        return self.prefill_call_s * num_calls + self.prefill[1] * num_rows + self.prefill[2] * num_pairs

    # ---- files

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @classmethod
    def from_json(cls, data: bytes, source: str = "worker model") -> Self:
        """`source` is named in the error. Raises PlanError."""
        try:
            return msgspec.json.decode(data, type=cls)
        except PlanError as error:
            raise PlanError(f"{source}: {error}") from error
        except msgspec.ValidationError as error:
            raise PlanError(f"{source} is no worker model: {error}") from error
        except msgspec.DecodeError as error:
            raise PlanError(f"{source} is no JSON: {error}") from error

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises PlanError."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise PlanError(f"cannot read {path}: {error.strerror}") from error
        return cls.from_json(data, str(path))

    def write(self, path: Path) -> None:
        """Raises PlanError."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.to_json() + b"\n")
        except OSError as error:
            raise PlanError(f"cannot write {path}: {error.strerror}") from error


def drawn(quantiles: Sequence[float], share: float) -> float:
    """The factor at `share` (0 to 1) of the quantiles, linear between two; 1.0 without any. Of a uniform `share`: the noise of one step."""
    if not quantiles:
        return 1.0
    place = share * (len(quantiles) - 1)
    low = min(int(place), len(quantiles) - 1)
    high = min(low + 1, len(quantiles) - 1)
    return quantiles[low] + (place - low) * (quantiles[high] - quantiles[low])
