"""What stays the same while fleets and rates are tried: load, limits, link, router settings, failures. Goes to processes as JSON."""

from __future__ import annotations

import re

import msgspec
from pydantic import ValidationError

from pd_serve.bench.statistics import Slo
from pd_serve.config import Config
from pd_serve.plan.errors import PlanError
from pd_serve.plan.load import Load

_OUTAGE = re.compile(r"(?P<role>prefill|decode|colocated)-(?P<index>\d+)@(?P<at>\d+(?:\.\d+)?)\+(?P<down>\d+(?:\.\d+)?)")


class Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of each worker, each way."""

    bytes_per_s: float
    setup_s: float = 0.0
    """Per transfer, beyond what the worker model's hand-over has."""
    is_layerwise: bool = True
    """Sent while later layers are computed; otherwise after the last."""


class Outage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker that dies and comes back."""

    role: str
    """`prefill`, `decode`, `colocated`."""
    index: int
    at_s: float
    down_s: float

    @classmethod
    def parse(cls, text: str) -> Outage:
        """`decode-0@60+30`. Raises PlanError."""
        match = _OUTAGE.fullmatch(text.strip())
        if match is None:
            raise PlanError(f"{text!r} is no failure: expected WORKER@SECONDS+SECONDS, such as decode-0@60+30")
        return cls(match["role"], int(match["index"]), float(match["at"]), float(match["down"]))


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    load: Load
    slo: Slo
    wire: Wire
    config: str
    """The router's settings as JSON (Config)."""
    seed: int = 0
    outages: tuple[Outage, ...] = ()

    def router_config(self) -> Config:
        """Raises PlanError."""
        try:
            return Config.model_validate_json(self.config)
        except ValidationError as error:
            raise PlanError(f"the router's settings are damaged: {error}") from error
