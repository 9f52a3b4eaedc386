"""Options that the commands of `pd-serve bench` share, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pd_serve.errors import ConfigError

if TYPE_CHECKING:
    from pd_serve.bench.arms import ArmSpec
    from pd_serve.bench.cluster import ClusterSpec
    from pd_serve.bench.cores import CoreShare
    from pd_serve.bench.statistics import Slo

REQUESTS = "Requests"
_ARMS = "What is measured"
_OUTPUT = "Results"
_LIMITS = "Limits (goodput)"

UrlOption = Annotated[str, typer.Option("--url", help="OpenAI-compatible endpoint, where one arm is enough", rich_help_panel=_ARMS)]
ArmOption = Annotated[
    list[str] | None,
    typer.Option(
        "--arm",
        metavar="NAME=WHAT",
        help="One side of a comparison: a URL, or a cluster to start, such as 1p1d or 1c (colocated); may be repeated",
        rich_help_panel=_ARMS,
    ),
]
PrefillOption = Annotated[int, typer.Option("--prefill", min=0, help="Prefill workers of a cluster to start", rich_help_panel=_ARMS)]
DecodeOption = Annotated[int, typer.Option("--decode", min=0, help="Decode workers of a cluster to start", rich_help_panel=_ARMS)]
ColocatedOption = Annotated[int, typer.Option("--colocated", min=0, help="Colocated workers of a cluster to start", rich_help_panel=_ARMS)]
BenchModelOption = Annotated[
    str, typer.Option("--model", help="Model of the clusters to start; of endpoints: the name to ask for", rich_help_panel=_ARMS)
]
ClusterSetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="One setting of the clusters to start: prefill.engine.cpu_affinity=0, colocated.engine.max_batch_tokens=256",
        rich_help_panel=_ARMS,
    ),
]
CoresOption = Annotated[
    int,
    typer.Option(
        "--cores-per-role",
        min=0,
        help="Cores that prefill and decode are pinned to, each; a colocated worker to both; 0: no pinning",
        rich_help_panel=_ARMS,
    ),
]
RoundsOption = Annotated[
    int, typer.Option("--rounds", min=1, help="Parts of each load (or of the trace) that the arms run in turn", rich_help_panel=_ARMS)
]
WarmupOption = Annotated[int, typer.Option("--warmup", min=0, help="Requests to each arm before", rich_help_panel=_ARMS)]
VocabOption = Annotated[int, typer.Option("--vocab", help="Token ids of prompts are below this", rich_help_panel=REQUESTS)]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds for a whole request", rich_help_panel=_ARMS)]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="A .json file, or a folder for a new one; by default bench-results/", rich_help_panel=_OUTPUT)
]
NameOption = Annotated[str, typer.Option("--name", help="What to call the result", rich_help_panel=_OUTPUT)]
SloTtftOption = Annotated[float, typer.Option("--slo-ttft-ms", min=0.0, help="Limit of time to first token", rich_help_panel=_LIMITS)]
SloItlOption = Annotated[
    float, typer.Option("--slo-itl-ms", min=0.0, help="Limit that 99 % of a request's gaps keep", rich_help_panel=_LIMITS)
]
SloTpotOption = Annotated[float, typer.Option("--slo-tpot-ms", min=0.0, help="Limit of a request's mean gap", rich_help_panel=_LIMITS)]


@dataclass(frozen=True, slots=True)
class ArmChoice:
    """What --url, --arm, --prefill, --decode, --colocated, --model and --set said."""

    url: str = ""
    arms: Sequence[str] = ()
    prefill: int = 0
    decode: int = 0
    colocated: int = 0
    model: str = ""
    sets: Sequence[str] = ()

    def specs(self, default: Sequence[str] = ()) -> tuple[ArmSpec, ...]:
        """`default`: arms (NAME=WHAT) where none was named. Raises ConfigError, BenchError."""
        from pd_serve.bench.arms import ArmSpec, parse_arm

        base = replace(cluster_of(self.model, self.sets), prefill=self.prefill, decode=self.decode, colocated=self.colocated)
        found = [parse_arm(text, base) for text in self.arms]
        if self.url:
            found.append(ArmSpec("endpoint", self.url))
        if base.num_workers:
            found.append(ArmSpec("cluster", cluster=base))
        if not found:
            found = [parse_arm(text, base) for text in default]
        if not found:
            raise ConfigError("nothing to measure: name a --url, an --arm, or workers to start with --prefill, --decode, --colocated")
        return tuple(found)


def cluster_of(model: str, sets: Sequence[str]) -> ClusterSpec:
    """Without workers yet. Raises ConfigError."""
    from pd_serve.bench.cluster import ClusterSpec

    settings = {}
    for item in sets:
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--set {item}: expected KEY=VALUE")
        settings[key] = value
    return ClusterSpec(model=model or "demo", settings=settings)


def cores_of(per_role: int) -> CoreShare | None:
    """Raises BenchError when there are too few cores."""
    from pd_serve.bench.cores import share_cores

    return share_cores(per_role) if per_role else None


def slo(ttft_ms: float, itl_ms: float, tpot_ms: float) -> Slo:
    from pd_serve.bench.statistics import Slo

    return Slo(ttft_ms / 1e3, itl_ms / 1e3, tpot_ms / 1e3)


def numbers(option: str, text: str) -> tuple[float, ...]:
    """`1,2.5,4`. Raises ConfigError."""
    try:
        found = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"{option} {text}: expected numbers parted by commas") from None
    if any(not 0 < value < float("inf") for value in found):
        raise ConfigError(f"{option} {text}: expected numbers above 0")
    return found
