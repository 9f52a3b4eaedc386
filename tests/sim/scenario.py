"""What a simulated run is like: drawn from its seed by the world."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tests.sim.fabric import FabricFaults, Lane

PROMPT = (0.01, 0.02)
STALLING = (0.3, 0.02)
"""Transport threads that often come late, as to close a window."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """The shape of one run."""

    num_prefill: int
    num_decode: int
    num_both: int
    num_routers: int
    block_size: int
    num_layers: int
    pool_tokens: tuple[int, int]
    num_requests: int
    duration_s: float
    cancel_share: float
    local_share: float
    """Of requests whose prompt is computed where it decodes."""
    transfer_timeout_s: float
    max_moves: int
    num_faults: int
    engine_faults: float
    fabric: FabricFaults
    lanes: tuple[Lane, ...]
    spike: tuple[float, float]
    transport_stall: tuple[float, float]
    """As in NodeSettings."""


def draw_scenario(rng: Random, seed: int) -> Scenario:
    """Half of the runs have no faults but cancels and small pools: there nothing may fail."""
    is_calm = rng.random() < 0.3
    num_both = rng.choice((0, 0, 1))
    spike = (0.0, 0.0) if rng.random() < 0.5 else (0.02, 0.2)
    return Scenario(
        num_prefill=rng.randint(1, 2),
        num_decode=rng.randint(1, 2),
        num_both=num_both,
        num_routers=rng.choice((1, 1, 2)),
        block_size=rng.choice((2, 4)),
        num_layers=rng.choice((1, 2, 3)),
        pool_tokens=rng.choice(((36, 44), (36, 80), (80, 160))),
        num_requests=rng.randint(3, 14),
        duration_s=rng.choice((0.01, 0.05, 0.4)),
        cancel_share=rng.choice((0.0, 0.2, 0.5)),
        local_share=rng.choice((0.0, 0.1, 0.5)),
        transfer_timeout_s=60.0 if is_calm else rng.choice((2.0, 2.0, 2.0, 0.5, 0.02, 0.004)),
        max_moves=1_000_000,
        num_faults=0 if is_calm else rng.randint(0, 5),
        engine_faults=0.0 if is_calm or rng.random() < 0.6 else 0.03,
        fabric=FabricFaults()
        if is_calm
        else FabricFaults(rng.choice((0.0, 0.02, 0.2)), rng.choice((0.0, 0.1)), rng.choice((0.0, 0.3)), rng.choice((0.0, 0.3)), spike),
        lanes=rng.choice(((Lane.CHECKED,), (Lane.SHM,), (Lane.RDMA,), (Lane.CHECKED, Lane.SHM, Lane.RDMA))),
        spike=(0.0, 0.0) if is_calm else spike,
        transport_stall=Random(f"{seed} stalls").choice((PROMPT, PROMPT, PROMPT, STALLING)),
    )
