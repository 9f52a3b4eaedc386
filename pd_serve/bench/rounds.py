"""Interleaving: plans are cut into rounds, and each round is run on every arm before the next, so that all arms share the minute.

Within a round the order of the arms alternates. A round ends when its last stream has; arms never disturb each other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise

import msgspec

from pd_serve.bench.arms import Arm
from pd_serve.bench.records import RequestPlan, RequestRecord
from pd_serve.bench.statistics import duration

RunPlans = Callable[[Arm, Sequence[RequestPlan]], Awaitable[list[RequestRecord]]]
"""Runs one round on one arm."""


Rounds = list[list[RequestRecord]]
"""Records of one arm, round by round."""


async def interleaved(arms: Sequence[Arm], plans: Sequence[RequestPlan], num_rounds: int, run: RunPlans) -> dict[str, Rounds]:
    """By arm, in the order of the plans. Times are as if the rounds of an arm had followed on each other at once."""
    records: dict[str, Rounds] = {arm.name: [] for arm in arms}
    ended_s = dict.fromkeys(records, 0.0)
    for turn, part in enumerate(cut(plans, num_rounds)):
        for arm in arms if turn % 2 == 0 else tuple(reversed(arms)):
            done = await run(arm, part)
            start_s = ended_s[arm.name] - min(record.sent_s for record in done)
            records[arm.name].append([shifted(record, start_s) for record in done])
            ended_s[arm.name] += duration(done)
    return records


def cut(plans: Sequence[RequestPlan], num_rounds: int) -> Sequence[Sequence[RequestPlan]]:
    """Contiguous parts of nearly one size, none empty; the times of each begin at 0. One round is the plans themselves."""
    num_rounds = max(1, min(num_rounds, len(plans)))
    if num_rounds == 1:
        return [plans]
    bounds = [len(plans) * index // num_rounds for index in range(num_rounds + 1)]
    parts: list[list[RequestPlan]] = []
    for low, high in pairwise(bounds):
        first_s = min((plan.at_s for plan in plans[low:high]), default=0.0)
        parts.append([msgspec.structs.replace(plan, at_s=plan.at_s - first_s) for plan in plans[low:high]])
    return parts


def shifted(record: RequestRecord, seconds: float) -> RequestRecord:
    """The same, `seconds` later."""
    return msgspec.structs.replace(
        record,
        planned_s=record.planned_s + seconds,
        sent_s=record.sent_s + seconds,
        token_s=tuple(moment + seconds for moment in record.token_s),
    )
