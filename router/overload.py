"""Whether a request that comes now would be served in time, and who waits. Built and called by the dispatcher; docs/overload.md.

    wait    = (prompt tokens that start before it + prompt tokens that were sent and are not computed) / measured tokens per second of all
              where it matters here what workers have cached: without those that nobody has to compute
    wait    = at least until as many sequences have ended as slots or memory are missing for it on the decode side
    TTFT    = wait + its own prompt, as far as it has to be computed / tokens per second of one worker
    batch   = sequences of now that will not have ended by then + those that begin until then and stay so long + its own
    ITL     = measured step time at that batch

With an SLO set, a request that would miss it is turned away at once, rather than served late and making others late: 429, and Retry-After
is the least delay after which the prediction is that it fits, if nothing else comes. Unknown is in time: nothing is turned away before
something was measured. Where not even an idle system could keep the SLO, what an idle system could is taken for it (LENIENCE), so that
waiting always helps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pd_serve.config import Config
from pd_serve.errors import ConfigError, OverloadedError
from pd_serve.observe import Metrics
from router.decode_forecast import DecodeForecast
from router.generation import Generation
from router.occupancy import Occupancy, OwnOccupancy
from router.policy.base import RoutingSettings, WorkerView
from router.queue import ChoiceQueue, QueueRules
from router.tenants import Tenants, Ticket, tenant_names
from router.totals import num_free_slots, totals_of

MIN_BEGUN = 3
"""First tokens before anything that was measured is believed."""
LENIENCE = 2.0
"""Times what an idle system needs for it: the least SLO that a request is held to."""
MAX_RETRY_S = 60.0
"""What clients of OpenAI's libraries wait at most."""
_RETRY_GRAIN_S = 0.01
_RETRY_MARGIN = 0.05
"""Share by which what was measured may change meanwhile."""


@dataclass(frozen=True, slots=True)
class OverloadSettings:
    num_classes: int = 1
    """Of priority."""
    max_queued: tuple[int, ...] = ()
    """By class; empty: as many as the dispatcher says, of each."""
    ageing_s: float = 10.0
    slo_ttft_s: float = 0.0
    """0: none."""
    slo_itl_s: float = 0.0
    has_several_tenants: bool = True
    """Those of one class share it by what their answers are expected to take."""


DEFAULT_OVERLOAD = OverloadSettings()


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that comes."""

    num_tokens: int
    """Of its prompt."""
    num_to_compute: int
    """Of these, where most of it is cached."""
    num_choices: int


@dataclass(frozen=True, slots=True)
class Situation:
    """Of the workers and the queue, as a request finds them."""

    prefill_tokens_per_s: float
    """Measured, of all workers that compute prompts together; 0: there are none."""
    one_tokens_per_s: float
    """Of the fastest of them."""
    num_choices_ahead: float
    num_tokens_ahead: float
    """Of prompts that wait, those that have to be computed."""
    num_tokens_sent: int
    """Of prompts that were sent and are not computed."""
    num_others: int
    """Sequences that workers hold or were sent and that do not generate for us yet: those of other routers, and prompts on their way."""
    num_free_slots: float
    """Sequences that the decode side could take."""


@dataclass(frozen=True, slots=True)
class Prediction:
    ttft_s: float
    itl_s: float


class Overload:
    """check() before submitting, overflow() after; started, began and ended of every choice. Owns the queue."""

    def __init__(
        self,
        settings: OverloadSettings,
        max_queued: int,
        occupancy: Occupancy,
        routing: RoutingSettings,
        metrics: Metrics,
        now: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._max_queued = settings.max_queued or (max_queued,) * settings.num_classes
        self._occupancy = occupancy
        self._max_sequences = routing.max_sequences
        self._metrics = metrics
        self._now = now
        self._forecast = DecodeForecast()
        self._num_begun = 0
        rules = QueueRules(settings.num_classes, settings.ageing_s)
        self.queue = ChoiceQueue(occupancy, routing.short_prompt_tokens, rules, now, self._expected_tokens)
        self.has_slo = settings.slo_ttft_s > 0 or settings.slo_itl_s > 0

    # ---- the life of a choice

    def began(self, generation: Generation, now: float) -> None:
        """Its first token has come."""
        if self.has_slo:
            self._num_begun += 1
            self._forecast.began(generation, now)

    def ended(self, generation: Generation, now: float) -> None:
        """It is over, however. Once for each."""
        self.queue.finished(generation)
        if self.has_slo:
            self._forecast.ended(generation, now)
        elif self._settings.has_several_tenants and generation.finish is not None:
            self._forecast.lengths.add(generation.ticket.tenant.name, generation.lifecycle.num_output_tokens)

    def is_empty(self) -> bool:
        """Nothing is left of any choice."""
        return not len(self.queue) and self._forecast.is_empty()

    # ---- who gets in

    def check(self, ticket: Ticket, asked: Asked, views: Sequence[WorkerView]) -> None:
        """Raises OverloadedError for a request that would miss an SLO. Precondition: has_slo."""
        if self._num_begun < MIN_BEGUN:
            return
        situation = self._situation(ticket, asked.num_tokens, views)
        reason = self._missed(situation, asked, 0.0)
        if reason:
            self._metrics.count("pd_serve_rejections_total", reason)
            what = "first token" if reason == "predicted_ttft" else "pace of generation"
            retry_after_s = self._retry_after_s(situation, asked)
            raise OverloadedError(f"the {what} would come too late: too much is in progress", retry_after_s)

    def overflow(self, starting: Sequence[Generation]) -> OverloadedError | None:
        """These were submitted, and those that cannot start find their class's part of the queue full."""
        for generation in starting:
            rank = generation.ticket.rank
            if generation.is_queued and self._occupancy.num_queued_of(rank) > self._max_queued[rank]:
                self._metrics.count("pd_serve_rejections_total", "queue_full")
                return OverloadedError("too many requests are waiting for a worker", retry_after_s=1.0)
        return None

    def predicted(self, situation: Situation, asked: Asked, delay_s: float) -> Prediction:
        """Of a prompt that comes after such a delay, in which nothing else does. 0 stands for what is not known."""
        forecast, now = self._forecast, self._now()
        compute_s = wait_s = 0.0
        num_ahead = situation.num_choices_ahead
        if situation.prefill_tokens_per_s > 0:
            work_s = (situation.num_tokens_ahead + situation.num_tokens_sent) / situation.prefill_tokens_per_s
            wait_s = max(0.0, work_s - delay_s)
            num_ahead *= wait_s / work_s if work_s > 0 else 0.0
            compute_s = asked.num_to_compute / situation.one_tokens_per_s
        num_missing = int(situation.num_choices_ahead + asked.num_choices - situation.num_free_slots)
        if num_missing > 0:
            wait_s = max(wait_s, forecast.seconds_until_ended(num_missing, now) - delay_s)
        ttft_s = wait_s + compute_s
        step_s = forecast.step_time(forecast.batch)
        stay_s = forecast.lengths.of("").mean() * step_s
        num_begun = num_ahead * min(1.0, stay_s / ttft_s) if ttft_s > 0 else 0.0
        num_running = forecast.num_after(delay_s + ttft_s, now) + situation.num_others + num_begun + asked.num_choices
        return Prediction(ttft_s, forecast.step_time(num_running / forecast.num_workers))

    def _missed(self, situation: Situation, asked: Asked, delay_s: float) -> str:
        """Label of pd_serve_rejections_total; empty: it would be in time."""
        predicted = self.predicted(situation, asked, delay_s)
        settings, rate = self._settings, situation.one_tokens_per_s
        if settings.slo_ttft_s and rate > 0 and predicted.ttft_s > max(settings.slo_ttft_s, LENIENCE * asked.num_to_compute / rate):
            return "predicted_ttft"
        alone_s = self._forecast.step_time(asked.num_choices / self._forecast.num_workers)
        if settings.slo_itl_s and predicted.itl_s > max(settings.slo_itl_s, alone_s):
            return "predicted_itl"
        return ""

    def _retry_after_s(self, situation: Situation, asked: Asked) -> float:
        """The least delay after which it would be in time, by bisection, and the time of one prompt: one that is being computed counts as
        a whole until it is done. MAX_RETRY_S if that is not enough.
        """
        low, high = 0.0, MAX_RETRY_S
        while high - low > _RETRY_GRAIN_S:
            middle = (low + high) / 2
            if self._missed(situation, asked, middle):
                low = middle
            else:
                high = middle
        rate = situation.one_tokens_per_s
        under_way_s = situation.num_tokens_ahead / max(1.0, situation.num_choices_ahead) / rate if rate > 0 else 0.0
        return min(MAX_RETRY_S, (1 + _RETRY_MARGIN) * high + under_way_s)

    def _situation(self, ticket: Ticket, num_tokens: int, views: Sequence[WorkerView]) -> Situation:
        ahead = self.queue.ahead_of(ticket)
        totals = totals_of(views)
        self._forecast.num_workers = max(1, totals.num_decode)
        of_one = (num_tokens + ahead.num_tokens) / (1 + ahead.num_choices)
        return Situation(
            prefill_tokens_per_s=totals.prefill_tokens_per_s,
            one_tokens_per_s=totals.one_tokens_per_s,
            num_choices_ahead=ahead.num_choices,
            num_tokens_ahead=ahead.num_to_compute,
            num_tokens_sent=totals.num_tokens_sent,
            num_others=max(0, totals.num_sequences - self._forecast.num_running),
            num_free_slots=num_free_slots(views, self._max_sequences, of_one),
        )

    def _expected_tokens(self, generation: Generation) -> float:
        num_left = generation.max_tokens - generation.lifecycle.num_output_tokens
        mean = self._forecast.lengths.of(generation.ticket.tenant.name).mean()
        return min(mean, num_left) if mean else 0.0


def check_overload(config: Config) -> None:
    """Raises ConfigError for what does not go together."""
    overload_settings(config)
    Tenants(config, OwnOccupancy())


def overload_settings(config: Config) -> OverloadSettings:
    """Raises ConfigError."""
    overload, router = config.overload, config.router
    if len(set(overload.classes)) != len(overload.classes):
        raise ConfigError("overload.classes names a class twice")
    if overload.max_queued and len(overload.max_queued) != len(overload.classes):
        raise ConfigError(f"overload.max_queued has {len(overload.max_queued)} numbers for the {len(overload.classes)} overload.classes")
    return OverloadSettings(
        num_classes=len(overload.classes),
        max_queued=overload.max_queued,
        ageing_s=overload.ageing_s,
        slo_ttft_s=router.slo_ttft_ms / 1000,
        slo_itl_s=router.slo_itl_ms / 1000,
        has_several_tenants=len(tenant_names(config)) > 1,
    )
