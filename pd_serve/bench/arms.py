"""The sides of a comparison: endpoints that are there already, or local clusters started for it. All are open for the whole measurement, so
that what is compared shares the minute, the prompts and the load by others.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from pd_serve.bench.client import Endpoint, RequestStyle
from pd_serve.bench.cluster import ClusterSpec, LocalCluster
from pd_serve.bench.errors import BenchError
from pd_serve.bench.progress import Bars
from pd_serve.bench.results import Config


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """An address, or a cluster to start."""

    name: str
    url: str = ""
    cluster: ClusterSpec | None = None


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How every arm is asked."""

    model: str = ""
    """Empty: the first that an endpoint lists."""
    api_key: str = ""
    timeout_s: float = 600.0
    style: RequestStyle = field(default_factory=RequestStyle)


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    endpoint: Endpoint
    cluster: LocalCluster | None

    @property
    def config(self) -> Config:
        """Effective settings by process, the arm's name before each; empty for an endpoint that was there already."""
        if self.cluster is None:
            return {}
        return {f"{self.name}/{process}": settings for process, settings in self.cluster.config.items()}


def parse_arm(text: str, base: ClusterSpec) -> ArmSpec:
    """`NAME=URL`, or `NAME=1p1d` (prefill and decode workers), `NAME=2c` (colocated ones); the rest of a cluster is as in `base`.

    Raises BenchError.
    """
    name, equals, what = text.partition("=")
    if not equals or not name or not what:
        raise BenchError(f"--arm {text}: expected NAME=URL, NAME=1p1d or NAME=1c")
    if re.match(r"https?://", what):
        return ArmSpec(name, what)
    if match := re.fullmatch(r"(\d+)p(\d+)d", what):
        return ArmSpec(name, cluster=replace(base, prefill=int(match[1]), decode=int(match[2]), colocated=0))
    if match := re.fullmatch(r"(\d+)c", what):
        return ArmSpec(name, cluster=replace(base, prefill=0, decode=0, colocated=int(match[1])))
    raise BenchError(f"--arm {text}: {what} is neither a URL nor a cluster such as 1p1d or 1c")


@asynccontextmanager
async def opened(specs: Sequence[ArmSpec], client: ClientSettings, bars: Bars) -> AsyncIterator[list[Arm]]:
    """Starts clusters one after the other, then reaches every endpoint; closes and stops all. Raises BenchError."""
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise BenchError(f"two arms have one name: {', '.join(names)}")
    with ExitStack() as clusters:
        async with AsyncExitStack() as endpoints:
            bar = bars.add("opening arms", len(specs))
            arms: list[Arm] = []
            for spec in specs:
                cluster = clusters.enter_context(LocalCluster(spec.cluster)) if spec.cluster is not None else None
                url = cluster.url if cluster is not None else spec.url
                endpoint = Endpoint(url, client.model if cluster is None else "", client.api_key, client.timeout_s, client.style)
                arms.append(Arm(spec.name, await endpoints.enter_async_context(endpoint), cluster))
                bar.advance()
            yield arms
