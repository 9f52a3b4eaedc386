"""Which process of pytest-xdist runs which files: every other takes the longest that is left, the rest take the shortest.

So files that start clusters, which want all cores, run beside small ones rather than beside each other, and the last file of each process
is neither long nor short: they end together.
"""

from __future__ import annotations

from typing import Any

import pytest

SECONDS: dict[str, float] = {}
"""Of the longest files of the default suite, under tests/, on two cores. Rough: what counts is their order."""
BY_FOLDER = {"e2e": 15.0, "faults": 15.0, "accuracy": 5.0, "contract": 5.0, "sim": 3.0}
OTHERS = 1.0


def seconds_of(file: str) -> float:
    """About how long a file takes. `file`: as in a node's id, tests/unit/kv/test_lease.py."""
    path = file.removeprefix("tests/")
    return SECONDS.get(path, BY_FOLDER.get(path.partition("/")[0], OTHERS))


def new_scheduler(config: pytest.Config, log: Any) -> object:
    # pytest-xdist may be missing where nothing is shared out.
    from xdist.scheduler import LoadFileScheduling

    class FromBothEnds(LoadFileScheduling):
        def _assign_work_unit(self, node: Any) -> None:
            takes_longest = int(node.gateway.id.removeprefix("gw")) % 2 == 0
            file = (max if takes_longest else min)(self.workqueue, key=seconds_of)
            self.workqueue.move_to_end(file, last=False)
            super()._assign_work_unit(node)

    return FromBothEnds(config, log)
