"""After which layers of a step its KV is pushed. Pure; decided on the control thread before the step runs.

A push costs a wake-up of the transport thread and some hundred microseconds of Python, whatever its size; where a worker computes on one
core, compute waits for it. So layers in which a step writes little are held back and go out together:

    512 tokens   |0|1|2|3|4|5| ...     every few layers
     32 tokens   |0 1 2 3 4 5 ... |    once, when the last layer's KV is written: its attention and MLP are still to come
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.events import PushPlan


def push_points(plans: Sequence[PushPlan], min_nbytes: int) -> frozenset[int]:
    """The layers after which everything written since the one before is pushed: as many as there are `min_nbytes` in the step's KV, at
    least one and at most every layer, evenly apart. Always the last layer; empty where nothing is pushed."""
    num_layers = max((plan.num_layers for plan in plans), default=0)
    if not num_layers:
        return frozenset()
    nbytes = sum(plan.nbytes for plan in plans)
    num_pushes = num_layers if min_nbytes <= 0 else max(1, min(num_layers, nbytes // min_nbytes))
    return frozenset((index + 1) * num_layers // num_pushes - 1 for index in range(num_pushes))
