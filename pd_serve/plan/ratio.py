"""How many prefill and decode instances a load needs. Pure; called by `pd-serve plan ratio`.

    N_P >= rate x S_in / T_P          S_in: prompt tokens to compute of a request, T_P: prompt tokens an instance computes per second
    N_D >= rate x S_out / T_D         S_out: output tokens of a request, T_D: output tokens an instance generates per second
    R = N_P / N_D = (S_in / S_out) x (T_D / T_P)

Rates are means, and the queue of what is busy all the time grows without bound: `utilisation` is the share of it that is planned for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from pd_serve.plan.errors import PlanError

HEADROOM = 0.8
"""Shown beside a plan without head-room: a fifth of every instance's time kept for bursts."""
_ROUNDING = 1e-9
"""3.0000000000000004 instances are three."""

_LEAST, _MOST = 1e-9, 1e15
"""Of rates and lengths: beyond them quotients are 0 or infinite."""
_MOST_GPUS = 1_000_000


class Demand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What requests ask for, on average."""

    prompt_tokens: float
    output_tokens: float
    hit_rate: float = 0.0
    """Share of prompt tokens that prefix caches already have: they are not computed."""

    @property
    def computed_tokens(self) -> float:
        return self.prompt_tokens * (1 - self.hit_rate)


class Supply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one instance of each kind gives while it is busy, and its GPUs (or cores, or whatever is paid for)."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    gpus_per_prefill: int = 1
    gpus_per_decode: int = 1


class Need(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Instances for one rate. The `exact` ones are fractions; the others are rounded up."""

    name: str
    """Of the rate."""
    requests_per_s: float
    utilisation: float
    exact_prefill: float
    exact_decode: float
    num_prefill: int
    num_decode: int
    num_gpus: int
    sustained_requests_per_s: float
    """Rate at which the first of the rounded pools reaches `utilisation`."""


class Split(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of GPUs, shared out for the highest rate."""

    num_prefill: int
    num_decode: int
    num_gpus: int
    """Used: what is left over serves nobody."""
    sustained_requests_per_s: float
    busy_prefill: float
    """Share of the time at that rate; as for decode, of 1."""
    busy_decode: float


def check(demand: Demand, supply: Supply) -> None:
    """Raises PlanError for what cannot be."""
    values: Mapping[str, float] = {
        "prompt tokens": demand.prompt_tokens,
        "output tokens": demand.output_tokens,
        "prefill tokens/s": supply.prefill_tokens_per_s,
        "decode tokens/s": supply.decode_tokens_per_s,
        "GPUs of a prefill instance": supply.gpus_per_prefill,
        "GPUs of a decode instance": supply.gpus_per_decode,
    }
    for name, value in values.items():
        _check_range(name, value)
    if not 0 <= demand.hit_rate < 1:
        raise PlanError(f"a prefix hit rate of {demand.hit_rate:g}: expected 0 or more, and less than 1")


def ratio(demand: Demand, supply: Supply) -> float:
    """R, prefill instances per decode instance."""
    return (demand.computed_tokens / demand.output_tokens) * (supply.decode_tokens_per_s / supply.prefill_tokens_per_s)


def needs(rates: Mapping[str, float], demand: Demand, supply: Supply, utilisation: float = 1.0) -> tuple[Need, ...]:
    """Of each rate, by its name: at `utilisation`, and at HEADROOM beside it where that is less. Raises PlanError."""
    shares = (utilisation, HEADROOM) if utilisation > HEADROOM else (utilisation,)
    return tuple(need(rate, demand, supply, share, name) for name, rate in rates.items() for share in shares)


def need(requests_per_s: float, demand: Demand, supply: Supply, utilisation: float = 1.0, name: str = "") -> Need:
    """Raises PlanError for a rate or a utilisation that cannot be."""
    check(demand, supply)
    if not _LEAST <= requests_per_s <= _MOST:
        raise PlanError(f"a rate of {requests_per_s:g} requests/s: expected {_LEAST:g} to {_MOST:g}")
    if not _LEAST <= utilisation <= 1:
        raise PlanError(f"a utilisation of {utilisation:g}: expected more than 0, at most 1")
    exact_prefill = requests_per_s / _rate(1, demand.computed_tokens, supply.prefill_tokens_per_s) / utilisation
    exact_decode = requests_per_s / _rate(1, demand.output_tokens, supply.decode_tokens_per_s) / utilisation
    num_prefill, num_decode = _up(exact_prefill), _up(exact_decode)
    return Need(
        name=name,
        requests_per_s=requests_per_s,
        utilisation=utilisation,
        exact_prefill=exact_prefill,
        exact_decode=exact_decode,
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_gpus=num_prefill * supply.gpus_per_prefill + num_decode * supply.gpus_per_decode,
        sustained_requests_per_s=_sustained(num_prefill, num_decode, demand, supply) * utilisation,
    )


def best_split(num_gpus: int, demand: Demand, supply: Supply, utilisation: float = 1.0) -> Split:
    """Of `num_gpus` the split that sustains the highest rate, the fewest GPUs where several do. Raises PlanError for too few."""
    check(demand, supply)
    if num_gpus > _MOST_GPUS:
        raise PlanError(f"{num_gpus} GPUs are more than can be shared out one by one: expected at most {_MOST_GPUS}")
    best: Split | None = None
    for num_prefill in range(1, num_gpus // supply.gpus_per_prefill + 1):
        num_decode = (num_gpus - num_prefill * supply.gpus_per_prefill) // supply.gpus_per_decode
        if not num_decode:
            break
        rate = _sustained(num_prefill, num_decode, demand, supply)
        if best is None or rate * utilisation > best.sustained_requests_per_s * (1 + _ROUNDING):
            best = Split(
                num_prefill=num_prefill,
                num_decode=num_decode,
                num_gpus=num_prefill * supply.gpus_per_prefill + num_decode * supply.gpus_per_decode,
                sustained_requests_per_s=rate * utilisation,
                busy_prefill=utilisation * rate / _rate(num_prefill, demand.computed_tokens, supply.prefill_tokens_per_s),
                busy_decode=utilisation * rate / _rate(num_decode, demand.output_tokens, supply.decode_tokens_per_s),
            )
    if best is None:
        least = supply.gpus_per_prefill + supply.gpus_per_decode
        raise PlanError(f"{num_gpus} GPUs are too few for one instance of each kind, which take {least}")
    return best


def _check_range(name: str, value: float) -> None:
    """Raises PlanError."""
    if not value > 0:
        raise PlanError(f"{name}: {value:g} is not above 0")
    if not _LEAST <= value <= _MOST:
        raise PlanError(f"{name}: {value:g} is not from {_LEAST:g} to {_MOST:g}")


def _sustained(num_prefill: int, num_decode: int, demand: Demand, supply: Supply) -> float:
    return min(
        _rate(num_prefill, demand.computed_tokens, supply.prefill_tokens_per_s),
        _rate(num_decode, demand.output_tokens, supply.decode_tokens_per_s),
    )


def _rate(num_instances: int, tokens: float, tokens_per_s: float) -> float:
    """Requests per second of so many instances that are busy all the time."""
    return num_instances * tokens_per_s / tokens


def _up(exact: float) -> int:
    return max(1, math.ceil(exact - _ROUNDING))
