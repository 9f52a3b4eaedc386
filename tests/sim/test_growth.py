"""Growth under want of memory (F31): far more requests than the pools hold all finish, right, and none is moved over and over."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import log2

import pytest

from pd_serve.ids import PeerId
from pd_serve.protocol.sampling import SamplingParams
from router.lifecycle import Action, Lifecycle, MoveReason
from tests.sim.fabric import FabricFaults
from tests.sim.model import VOCAB_SIZE
from tests.sim.router import make_request
from tests.sim.world import Planted, Report, World
from workers.decode.machine import DecodeMachine


@dataclass(frozen=True, slots=True)
class Case:
    num_decode: int
    num_requests: int
    requests_per_pool: float
    """At their full length."""
    num_prompt_tokens: int
    num_output_tokens: int
    longest_retry_s: float
    """The sooner a moved request comes again, the more it is preempted; the later, the less there is to simulate."""


class GrowthWorld(World):
    """Two prefill workers, which decode for those whom a decode worker has put out, and all pools alike."""

    patience_s = 20.0

    def __init__(self, seed: int, case: Case) -> None:
        self._case = case
        self.preemptions: Counter[int] = Counter()
        super().__init__(seed, Planted(lifecycle=self._counting_lifecycle()))
        pool_tokens = int(case.requests_per_pool * (case.num_prompt_tokens + case.num_output_tokens))
        self.fabric.faults = FabricFaults()
        self.scenario = replace(
            self.scenario,
            num_prefill=2,
            num_decode=case.num_decode,
            num_both=0,
            num_routers=1,
            pool_tokens=(pool_tokens, pool_tokens),
            num_requests=case.num_requests,
            duration_s=0.001,
            cancel_share=0.0,
            local_share=0.0,
            transfer_timeout_s=60.0,
            num_faults=0,
            engine_faults=0.0,
            fabric=FabricFaults(),
            spike=(0.0, 0.0),
        )

    def _start_router(self, name: str) -> None:
        super()._start_router(name)
        self.routers[-1].retry_s = (0.0005, self._case.longest_retry_s)

    def _counting_lifecycle(self) -> type[Lifecycle]:
        preemptions = self.preemptions

        class CountingLifecycle(Lifecycle):
            def _move(self, reason: MoveReason, blamed: PeerId, detail: str) -> tuple[Action, ...]:
                preemptions[id(self)] += reason is MoveReason.PREEMPTED and detail == "no blocks left"
                return super()._move(reason, blamed, detail)

        return CountingLifecycle

    def _plan_request(self, number: int) -> None:
        prompt = tuple(self.rng.choices(range(1, VOCAB_SIZE), k=self._case.num_prompt_tokens))
        request = make_request(number, prompt, SamplingParams(max_tokens=self._case.num_output_tokens, ignore_eos=True))
        self.requests.append(request)
        self.loop.at(self.rng.uniform(0.0, self.scenario.duration_s), lambda: self._submit(request))


_MOST_RUNS = 8
CASES = {
    "pool of 9.6 requests": Case(1, 256, 9.6, 32, 16, 0.1),
    "eight pools of 1.2 requests": Case(8, 256, 1.2, 32, 16, 0.1),
    "one pool of 1.2 requests": Case(1, 32, 1.2, 32, 16, 0.02),
    "long outputs": Case(1, 48, 3.0, 8, 64, 0.02),
    "far longer outputs": Case(1, 24, 2.0, 4, 128, 0.003),
}


def gets_on(seed: int, case: Case) -> bool:
    """Whether each request that was preempted had got on by as much as it had since the last time. All of them finish."""
    world = GrowthWorld(seed, case)
    report: Report = world.run()
    assert report.counts["finished"] == case.num_requests
    most = max(world.preemptions.values(), default=0)
    print(f"{report.virtual_s:.2f} virtual s, {report.counts['moves']} moves, {sum(world.preemptions.values())} preempted, at most {most}")
    return most <= log2(case.num_output_tokens) + 1


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(1))
def test_more_requests_than_memory_all_finish_right(seed: int, case: str) -> None:
    assert gets_on(seed, CASES[case])


def test_workers_that_compute_prompts_for_each_other_do_not_wait_in_a_circle() -> None:
    """Two whose pools hold little more than a request: each reserves for one that the other computes."""
    case = CASES["one pool of 1.2 requests"]
    for seed in range(1, 6):
        gets_on(seed, case)


def test_admission_that_lets_a_moved_request_in_for_a_few_tokens_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one of some seeds: which one depends on the order in which the machines speak."""
    monkeypatch.setattr(DecodeMachine, "_headroom_for", lambda self, frame: self._settings.headroom_tokens)
    assert not all(gets_on(seed, CASES["far longer outputs"]) for seed in range(_MOST_RUNS))
