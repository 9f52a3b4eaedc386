"""Which cores the arms of a fair comparison get: prefill and decode each their own, a colocated worker the same ones together.

An arm may have as many workers as it likes on them; only CPU arms are pinned.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from pd_serve.bench.errors import BenchError


@dataclass(frozen=True, slots=True)
class CoreShare:
    """Cores of each role."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]

    def apart(self) -> dict[str, str]:
        """Settings of a prefill and a decode worker that share nothing."""
        return {
            "prefill.engine.cpu_affinity": _listed(self.prefill),
            "decode.engine.cpu_affinity": _listed(self.decode),
            "prefill.engine.threads": str(len(self.prefill)),
            "decode.engine.threads": str(len(self.decode)),
        }

    def together(self) -> dict[str, str]:
        """Settings of a colocated worker on the cores of both."""
        cores = self.prefill + self.decode
        return {"colocated.engine.cpu_affinity": _listed(cores), "colocated.engine.threads": str(len(cores))}

    def alone(self) -> dict[str, str]:
        """Settings of a colocated worker on the cores of prefill: what a prompt takes with as many cores and no transfer."""
        return {"colocated.engine.cpu_affinity": _listed(self.prefill), "colocated.engine.threads": str(len(self.prefill))}


def share_cores(per_role: int) -> CoreShare:
    """The first usable cores go to prefill, the next to decode. Raises BenchError when there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 * per_role:
        raise BenchError(f"{per_role} cores for each role need {2 * per_role} in all, this process may use {len(cores)}")
    return CoreShare(tuple(cores[:per_role]), tuple(cores[per_role : 2 * per_role]))


def _listed(cores: tuple[int, ...]) -> str:
    return ",".join(map(str, cores))
