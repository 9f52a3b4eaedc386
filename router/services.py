"""Everything a request handler needs, made once per router process and found at `app.state.services`."""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass, field

from fastapi import Request

from pd_serve.config import Config
from pd_serve.ids import RouterId
from pd_serve.observe import Metrics
from router.admission import Admission, Limits, TextLimits, limits_of
from router.cors import Cors
from router.dispatcher import Dispatcher
from router.fleet import FleetControl
from router.grammars import GrammarChecks
from router.occupancy import Occupancy
from router.pool import WorkerPool
from router.siblings import Siblings
from router.tokenizer import TextCodec
from router.tools.registry import OutputFormats


@dataclass(slots=True)
class Services:
    config: Config
    router_id: RouterId
    model_name: str
    max_model_len: int
    """Upper bound from the configuration or the model folder; 0: none."""
    codec: TextCodec
    formats: OutputFormats
    metrics: Metrics
    admission: Admission
    pool: WorkerPool
    dispatcher: Dispatcher
    occupancy: Occupancy
    grammars: GrammarChecks
    cors: Cors | None = None
    """None: no web page of another origin is served."""
    siblings: Siblings | None = None
    """The other processes of this router; None: it is one process."""
    worker_tls: ssl.SSLContext | None = None
    """For control calls to workers at https:// addresses; None: the system's authorities."""
    fleet: FleetControl = field(init=False)
    """Set at once, by fleet_start.py."""
    created: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False
    _limits: Limits | None = None
    _limits_of: int = 0
    """Version of the pool they were made of."""

    @property
    def session_header(self) -> bytes:
        """In lower case; empty: none is looked at."""
        return self.config.routing.session_header.lower().encode()

    def limits(self) -> Limits:
        """Of the workers as they are; made anew when they change."""
        if self._limits is None or self._limits_of != self.pool.version:
            router, codec = self.config.router, self.codec
            text = TextLimits(codec.max_token_chars, router.max_prompt_chars)
            self._limits_of = self.pool.version
            self._limits = limits_of(self.pool.workers, self.max_model_len, codec.vocab_size, router.max_prompt_tokens, text)
        return self._limits

    def why_not_ready(self) -> str:
        """Empty: a request could be served now."""
        if self.is_draining:
            return "the router is shutting down"
        workers = [worker for worker in self.pool.workers if worker.is_available]
        decodes = [worker for worker in workers if worker.can_decode]
        prefills = [worker for worker in workers if not worker.can_decode]
        if not decodes:
            refusals = self.pool.refusals()
            return "no worker that decodes is linked" + (f" (refused: {'; '.join(refusals)})" if refusals else "")
        waiting = any(self.pool.is_joining(worker) for worker in workers)
        joined = any(decode.peer in prefill.joined and prefill.peer in decode.joined for prefill in prefills for decode in decodes)
        if prefills and not joined and waiting:
            return "prefill and decode workers have not joined yet"
        return ""


def services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services
