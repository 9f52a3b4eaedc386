"""A simulated router: the real Lifecycle of every request under a tiny dispatcher that picks workers at random among those that can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from pd_serve.errors import PdServeError
from pd_serve.ids import AttemptId, PeerId, RouterId
from pd_serve.protocol.link import (
    Closed,
    Failed,
    FinishReason,
    Peers,
    PeerStatus,
    PrefillDone,
    Refused,
    Reserved,
    Role,
    Step,
    WorkerFrame,
)
from pd_serve.protocol.sampling import SamplingParams
from router.lifecycle import (
    Action,
    Assigned,
    AwaitHandover,
    CancelRequested,
    Emit,
    Event,
    Finished,
    FrameArrived,
    GaveUp,
    HandoverTimedOut,
    Lifecycle,
    LifecycleSettings,
    NeedAssignment,
    Send,
    TokenArrived,
    WorkerLost,
)
from tests.sim.checks import LegTracker
from tests.sim.core import Loop, Process, ViolationError
from tests.sim.links import Link
from tests.sim.model import Answer, chosen_logprob, oracle


@dataclass(slots=True, eq=False)
class Request:
    """One client request and what has become of it."""

    number: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    answer: Answer
    received: list[int] = field(default_factory=list)
    is_cancelled: bool = False
    is_orphaned: bool = False
    """Its router died."""
    finish: FinishReason | None = None
    error: PdServeError | None = None
    lifecycle: Lifecycle | None = None
    num_assignments: int = 0
    attempts: list[AttemptId] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.is_cancelled or self.is_orphaned or self.finish is not None or self.error is not None

    @property
    def final_tokens(self) -> tuple[int, ...]:
        return self.prompt + self.answer.tokens


def make_request(number: int, prompt: tuple[int, ...], sampling: SamplingParams) -> Request:
    return Request(number, prompt, sampling, oracle(prompt, sampling))


class SimRouter(Process):
    def __init__(self, loop: Loop, name: str, settings: LifecycleSettings, lifecycle_class: type[Lifecycle]) -> None:
        super().__init__(loop, name)
        self.router_id = RouterId(name)
        self.links: dict[PeerId, Link] = {}
        self.requests: dict[AttemptId, Request] = {}
        """Every attempt ever made here, for the oracle."""
        self.open: list[Request] = []
        self.register_attempt: Callable[[AttemptId, Request], None] = lambda attempt_id, request: None
        self.local_share = 0.1
        self.retry_s = (0.0005, 0.02)
        """A moved request is assigned again after so many seconds."""
        self.num_handover_timeouts = 0
        self._settings = settings
        self._lifecycle_class = lifecycle_class
        self._legs = LegTracker()
        self._joined: dict[PeerId, frozenset[PeerId]] = {}
        self._draining: set[PeerId] = set()

    # ---- clients

    def submit(self, request: Request) -> None:
        def new_attempt_id() -> AttemptId:
            attempt_id = AttemptId(self.loop.rng.getrandbits(40))
            self.requests[attempt_id] = request
            request.attempts.append(attempt_id)
            self.register_attempt(attempt_id, request)
            return attempt_id

        self.loop.log(self.name, "request", request.number, request.prompt, request.sampling, "->", request.answer)
        request.lifecycle = self._lifecycle_class(self._settings, request.prompt, request.sampling, new_attempt_id)
        self.open.append(request)
        self._carry_out(request, request.lifecycle.start())

    def cancel(self, request: Request) -> None:
        if not request.is_over:
            request.is_cancelled = True
            self.loop.log(self.name, "request", request.number, "cancelled")
            self._feed(request, CancelRequested())

    def _feed(self, request: Request, event: Event) -> None:
        assert request.lifecycle is not None
        self._legs.on_event(event)
        actions = request.lifecycle.handle(event, self.clock)
        self._legs.on_actions(actions)
        self._legs.check(request.lifecycle.attempt_id, request.attempts)
        self._carry_out(request, actions)

    def _carry_out(self, request: Request, actions: tuple[Action, ...]) -> None:
        for action in actions:
            match action:
                case Send(peer, frame):
                    self.loop.log(self.name, "request", request.number, "->", peer.worker_id, frame)
                    link = self.links.get(peer)
                    if link is not None:
                        link.to_node(frame)
                case NeedAssignment(exclude, reason):
                    self.loop.log(self.name, "request", request.number, "needs a place:", reason)
                    request.num_assignments += 1
                    backoff = self.loop.rng.uniform(0, 0.001) if request.num_assignments == 1 else self.loop.rng.uniform(*self.retry_s)
                    self.loop.after(backoff, lambda exclude=exclude: self.call(lambda: self._assign(request, exclude)))  # type: ignore[misc]
                case Emit(token):
                    self._emit(request, token.token_id, token.logprobs.chosen if token.logprobs else None)
                case AwaitHandover(attempt_id, timeout_s):
                    self.loop.after(timeout_s, partial(self.call, partial(self._handover_timed_out, request, attempt_id)))
                case Finished(reason):
                    self._end(request)
                    request.finish = reason
                case GaveUp(error):
                    self._end(request)
                    request.error = error
        if request.lifecycle is not None and request.lifecycle.is_done and request in self.open:
            self.open.remove(request)

    def _handover_timed_out(self, request: Request, attempt_id: AttemptId) -> None:
        assert request.lifecycle is not None
        before = request.lifecycle.attempt_id
        self._feed(request, HandoverTimedOut(attempt_id))
        self.num_handover_timeouts += request.lifecycle.attempt_id != before

    def _end(self, request: Request) -> None:
        self.loop.log(self.name, "request", request.number, "ends")
        if request.finish is not None or request.error is not None:
            raise ViolationError(f"request {request.number} ends twice")

    def _emit(self, request: Request, token_id: int, logprob: float | None) -> None:
        if request.is_over:
            raise ViolationError(f"request {request.number} gets a token after its end")
        position = len(request.received)
        request.received.append(token_id)
        if tuple(request.received) != request.answer.tokens[: position + 1]:
            raise ViolationError(f"request {request.number} gets {request.received}, not {request.answer.tokens}")
        expected = chosen_logprob(request.prompt + request.answer.tokens[:position]) if request.sampling.num_logprobs >= 0 else None
        if logprob != expected:
            raise ViolationError(f"request {request.number} gets logprob {logprob} at {position}, not {expected}")

    # ---- dispatcher

    def _assign(self, request: Request, exclude: frozenset[PeerId]) -> None:
        lifecycle = request.lifecycle
        if lifecycle is None or lifecycle.is_done or lifecycle.attempt_id is not None:
            return
        assignment = self._choose(exclude) or self._choose(frozenset())
        if assignment is None:
            self.loop.after(0.02, lambda: self.call(lambda: self._assign(request, exclude)))
            return
        self._feed(request, assignment)

    def _choose(self, exclude: frozenset[PeerId]) -> Assigned | None:
        rng = self.loop.rng
        usable = [link.node.info for peer, link in sorted(self.links.items()) if peer not in exclude and peer not in self._draining]
        decodes = [info.peer for info in usable if info.role is not Role.PREFILL] or [info.peer for info in usable]
        if not decodes:
            return None
        decode = rng.choice(decodes)
        prefills = [
            info.peer
            for info in usable
            if info.role is Role.PREFILL and info.peer in self._joined.get(decode, ()) and decode in self._joined.get(info.peer, ())
        ]
        if not prefills or rng.random() < self.local_share:
            return Assigned(None, decode)
        return Assigned(rng.choice([peer for peer in prefills if peer != decode] or [None]), decode)

    # ---- links

    def on_link(self, link: Link) -> None:
        self.links[link.node.peer] = link
        self._send_peers()

    def on_link_lost(self, link: Link) -> None:
        peer = link.node.peer
        if self.links.get(peer) is not link:
            return
        del self.links[peer]
        self._joined.pop(peer, None)
        self._draining.discard(peer)
        for request in list(self.open):
            if request.lifecycle is not None and peer in request.lifecycle.peers:
                self._feed(request, WorkerLost(peer))
        self._send_peers()

    def _send_peers(self) -> None:
        frame = Peers(tuple(link.node.info for _, link in sorted(self.links.items())))
        for link in self.links.values():
            link.to_node(frame)

    def on_frame(self, link: Link, frame: WorkerFrame) -> None:
        peer = link.node.peer
        match frame:
            case Step(outputs):
                for output in outputs:
                    request = self.requests.get(output.attempt_id)
                    if request is not None and request in self.open:
                        self._feed(request, TokenArrived(peer, output))
            case Reserved() | Refused() | PrefillDone() | Failed() | Closed():
                if isinstance(frame, Refused | Failed) and frame.reason.value == "draining":
                    self._draining.add(peer)
                request = self.requests.get(frame.attempt_id)
                if request is not None and request in self.open:
                    self._feed(request, FrameArrived(peer, frame))
            case PeerStatus(states):
                self._joined[peer] = frozenset(state.peer for state in states if state.joined)
            case _:
                pass

    def crash(self) -> None:
        if self.is_dead:
            return
        self.die()
        for request in self.open:
            request.is_orphaned = True
        self.open.clear()
        for link in list(self.links.values()):
            link.router_knows_end = True
            link.cut()
