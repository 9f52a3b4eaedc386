"""Which process of pytest-xdist runs which files: every other takes the longest that is left, the rest take the shortest.

So files that start clusters, which want all cores, run beside small ones rather than beside each other, and the last file of each process
is neither long nor short: they end together.
"""

from __future__ import annotations

from typing import Any

import pytest

SECONDS: dict[str, float] = {
    "contract/ucx/test_identity.py": 60,
    "faults/test_cancel_phases.py": 60,
    "e2e/test_tensor_parallel.py": 55,
    "faults/test_kills.py": 55,
    "contract/ucx/test_death.py": 50,
    "e2e/test_one_prefill_one_decode.py": 50,
    "accuracy/test_disaggregated_equals_colocated.py": 50,
    "faults/test_drain.py": 40,
    "contract/nixl/test_death.py": 35,
    "e2e/test_two_ranks.py": 35,
    "contract/ucx/test_idle.py": 30,
    "e2e/test_workers_die.py": 30,
    "accuracy/test_greedy_equals_transformers.py": 30,
    "sim/test_seeds.py": 30,
    "e2e/test_layouts_differ.py": 25,
    "e2e/test_tls.py": 25,
    "e2e/test_secured_and_restarted.py": 25,
    "sim/test_growth.py": 25,
    "model/test_lease_model.py": 25,
    "unit/workers/test_front.py": 25,
    "unit/engine/test_parallel.py": 25,
    "e2e/test_latents.py": 20,
    "e2e/test_nixl.py": 20,
    "accuracy/test_matrix_of_ranks.py": 30,
    "unit/router/test_openapi.py": 15,
    "unit/bench/test_interference_run.py": 15,
    "accuracy/test_invariance.py": 20,
    "accuracy/test_sparse_models_equal_transformers.py": 25,
    "accuracy/test_moved_equals_undisturbed.py": 20,
    "contract/ucx/test_pool.py": 20,
    "contract/test_transport_thread.py": 20,
    "unit/router/test_failure_classes.py": 20,
    "unit/router/test_failures.py": 20,
    "sim/test_planted_bugs.py": 15,
    "unit/engine/test_parallel_group.py": 8,
    "unit/cli/test_launch.py": 8,
    "unit/workers/test_front_openapi.py": 6,
    "unit/protocol/test_hostile_links.py": 5,
    "unit/protocol/test_server.py": 5,
    "unit/engine/attention/test_cpu.py": 5,
    "unit/workers/test_hostile_frames.py": 5,
}
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
