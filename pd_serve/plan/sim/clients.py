"""The clients of a simulation: requests come at their times, are turned away or answered, and what became of them goes to the outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pd_serve.config import Config
from pd_serve.errors import AuthenticationError, OverloadedError
from pd_serve.plan.outcome import Outcome, Served
from pd_serve.plan.sim.events import VirtualLoop
from pd_serve.plan.sim.requests import Ask
from pd_serve.plan.sim.router_side import RouterSide
from pd_serve.plan.sim.spec import Retries
from pd_serve.plan.workload import PlannedRequest
from pd_serve.protocol.sampling import SamplingParams
from router.tenants import RateLimitError, Tenant, Tenants, Ticket

_TOLD_EVERY = 1000


class Clients:
    """start() -> requests come by themselves; is_over() when all have been answered."""

    def __init__(
        self, loop: VirtualLoop, router: RouterSide, requests: Iterator[PlannedRequest], outcome: Outcome, retries: Retries
    ) -> None:
        self.num_begun = 0
        self.num_over = 0
        self._loop = loop
        self._router = router
        self._requests = requests
        self._outcome = outcome
        self._max_retries = retries.max_retries
        self._desk = _Desk(router.config, router, loop)
        self._has_more = True
        self._last_at_s = 0.0

    def start(self, request_s: float, progress: Callable[[int], None] | None = None) -> None:
        """`request_s`: on top of every time, as WorkerModel says. `progress`: hears how many are over."""
        self._request_s = request_s
        self._progress = progress
        self._await_next()

    def is_over(self) -> bool:
        return not self._has_more and self.num_over == self.num_begun

    def _await_next(self) -> None:
        planned = next(self._requests, None)
        if planned is None:
            self._has_more = False
        else:
            assert planned.at_s >= self._last_at_s, "requests come in the order of time"
            self._last_at_s = planned.at_s
            self._loop.at(planned.at_s, self._come, planned)

    def _come(self, planned: PlannedRequest) -> None:
        self.num_begun += 1
        self._ask(Ask(planned, self._router.config.kv.prefix_cache), 0)
        self._await_next()

    def _ask(self, ask: Ask, num_retries: int) -> None:
        planned = ask.planned
        try:
            ticket = self._desk.enter(planned)
        except (AuthenticationError, RateLimitError, OverloadedError) as error:
            self._turned_away(ask, num_retries, getattr(error, "retry_after_s", 0.0))
            return
        sampling = SamplingParams(planned.num_output)
        dispatcher = self._router.dispatcher
        try:
            (ask.generation,) = dispatcher.submit(
                ask.as_token_ids(), (sampling,), lambda: self._ended(ask, ticket), wakes_on_token=False, ticket=ticket
            )
        except OverloadedError as error:
            self._desk.give_back(ticket, planned)
            self._turned_away(ask, num_retries, error.retry_after_s)

    def _turned_away(self, ask: Ask, num_retries: int, after_s: float) -> None:
        now = self._loop.now()
        if num_retries < self._max_retries and 0 < after_s < float("inf"):
            self._loop.at(now + after_s, self._ask, ask, num_retries + 1)
            return
        self._outcome.rejected(self._router.metrics.last_rejection, ask.at_s)
        self._is_over()

    def _ended(self, ask: Ask, ticket: Ticket) -> None:
        generation = ask.generation
        assert generation is not None
        planned = ask.planned
        self._desk.leave(ticket, ask.num_output_tokens)
        if generation.finish is None:
            self._outcome.failed(ask.at_s)
        else:
            extra = self._request_s - ask.at_s
            now = self._loop.now()
            served = Served(
                ask.at_s, ask.first_at + extra, now + extra, planned.num_prompt, ask.num_cached, planned.num_output, ask.num_late_gaps
            )
            self._outcome.add_request(served)
        ask.generation = None
        self._is_over()

    def _is_over(self) -> None:
        self.num_over += 1
        if self._progress is not None and self.num_over % _TOLD_EVERY == 0:
            self._progress(self.num_over)


class _Desk:
    """Admission, as router/admission.py does it for an HTTP request."""

    def __init__(self, config: Config, router: RouterSide, loop: VirtualLoop) -> None:
        self._router = router
        self._max_open = config.router.max_open_requests
        self._classes = config.overload.classes
        self._tenants = Tenants(config, router.occupancy, loop.now) if config.security.client_keys else None
        self._by_name: dict[str, Tenant] = {}

    def enter(self, planned: PlannedRequest) -> Ticket:
        """Raises AuthenticationError, RateLimitError, OverloadedError, having counted nothing."""
        count = self._router.metrics.count
        rank = min(planned.priority, len(self._classes) - 1)
        if self._tenants is None:
            tenant = self._by_name.get(planned.key) or self._by_name.setdefault(planned.key, Tenant(planned.key))
            ticket = Ticket(tenant, rank)
        else:
            try:
                ticket = self._tenants.ticket(f"Bearer {planned.key}", self._classes[rank])
            except AuthenticationError:
                count("pd_serve_rejections_total", "api_key")
                raise
            except RateLimitError:
                count("pd_serve_rejections_total", "requests_per_minute")
                raise
        if not self._router.occupancy.enter(self._max_open):
            self._spent(ticket, 0, -1)
            count("pd_serve_rejections_total", "open_requests")
            raise OverloadedError("too many requests are in progress", retry_after_s=1.0)
        if self._tenants is not None:
            try:
                self._tenants.charge(ticket, planned.num_prompt)
            except RateLimitError:
                self._router.occupancy.leave()
                count("pd_serve_rejections_total", "tokens_per_minute")
                raise
        return Ticket(ticket.tenant, ticket.rank, planned.session)

    def give_back(self, ticket: Ticket, planned: PlannedRequest) -> None:
        self._spent(ticket, -planned.num_prompt, -1)
        self._router.occupancy.leave()

    def leave(self, ticket: Ticket, num_generated: int) -> None:
        self._spent(ticket, num_generated, 0)
        self._router.occupancy.leave()

    def _spent(self, ticket: Ticket, num_tokens: int, num_requests: int) -> None:
        if self._tenants is not None:
            self._tenants.spent(ticket, num_tokens, num_requests)
