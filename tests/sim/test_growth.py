"""Growth under want of memory (F31): far more requests than the pools hold all finish, right, and none is moved over and over."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from pd_serve.ids import PeerId
from pd_serve.protocol.sampling import SamplingParams
from router.lifecycle import Action, Lifecycle, MoveReason
from tests.sim.fabric import FabricFaults
from tests.sim.model import VOCAB_SIZE
from tests.sim.router import make_request
from tests.sim.world import Planted, Report, World

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 16


class GrowthWorld(World):
    """Two prefill workers, and decode workers of which each holds `requests_per_pool` requests at their full length."""

    def __init__(self, seed: int, num_decode: int, num_requests: int, requests_per_pool: float) -> None:
        self.preemptions: Counter[int] = Counter()
        super().__init__(seed, Planted(lifecycle=self._counting_lifecycle()))
        pool_tokens = int(requests_per_pool * (PROMPT_TOKENS + OUTPUT_TOKENS))
        self.fabric.faults = FabricFaults()
        self.scenario = replace(
            self.scenario,
            num_prefill=2,
            num_decode=num_decode,
            num_both=0,
            num_routers=1,
            pool_tokens=(pool_tokens, pool_tokens),
            num_requests=num_requests,
            duration_s=0.001,
            cancel_share=0.0,
            local_share=0.0,
            transfer_timeout_s=60.0,
            num_faults=0,
            engine_faults=0.0,
            fabric=FabricFaults(),
            spike=(0.0, 0.0),
        )

    def _counting_lifecycle(self) -> type[Lifecycle]:
        preemptions = self.preemptions

        class CountingLifecycle(Lifecycle):
            def _move(self, reason: MoveReason, blamed: PeerId, detail: str) -> tuple[Action, ...]:
                preemptions[id(self)] += reason is MoveReason.PREEMPTED
                return super()._move(reason, blamed, detail)

        return CountingLifecycle

    def _plan_request(self, number: int) -> None:
        prompt = tuple(self.rng.choices(range(1, VOCAB_SIZE), k=PROMPT_TOKENS))
        request = make_request(number, prompt, SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True))
        self.requests.append(request)
        self.loop.at(self.rng.uniform(0.0, self.scenario.duration_s), lambda: self._submit(request))


@pytest.mark.parametrize(
    ("num_decode", "num_requests", "requests_per_pool"),
    [(1, 256, 9.6), (8, 256, 1.2), (1, 32, 1.2)],
    ids=["pool of 9.6 requests", "eight pools of 1.2 requests", "one pool of 1.2 requests"],
)
@pytest.mark.parametrize("seed", range(3))
def test_more_requests_than_memory_all_finish_right(seed: int, num_decode: int, num_requests: int, requests_per_pool: float) -> None:
    world = GrowthWorld(seed, num_decode, num_requests, requests_per_pool)
    report: Report = world.run()
    assert report.counts["finished"] == num_requests
    most = max(world.preemptions.values(), default=0)
    print(f"{report.virtual_s:.2f} virtual s, {report.counts['moves']} moves, {sum(world.preemptions.values())} preempted, at most {most}")
    assert most <= OUTPUT_TOKENS
