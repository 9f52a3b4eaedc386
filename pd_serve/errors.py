"""The one error tree. Raise where the fact is known, translate once per process edge.

PdServeError
├── ConfigError             bad or unknown setting
├── ModelError              model folder missing, unsupported architecture, damaged shard
├── RequestError            the client's request cannot be served as written (4xx)
│   ├── InvalidRequestError
│   ├── ContextLengthError
│   ├── AuthenticationError
│   └── NotFoundError
├── UnavailableError        nothing is wrong with the request (429, 503), a retry may succeed
│   ├── OverloadedError
│   └── NoWorkerError
├── AttemptError            one attempt failed; the router may move the request
│   ├── NoCapacityError
│   ├── PreemptedError
│   ├── TransferError
│   ├── PeerLostError
│   └── EngineError
├── ProtocolError           a frame, record or handshake that breaks the protocol
│   ├── IncompatibleError
│   └── StaleError
└── TransportError          the transport library refused or failed
    ├── TransportUnavailableError   library not importable: names the extra to install
    └── OutOfBoundsError            a write outside its registered region

Each class has `code` (stable, documented in docs/errors.md), `http_status` and `retryable`.
"""

from __future__ import annotations

from typing import ClassVar


class PdServeError(Exception):
    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    @property
    def message(self) -> str:
        return str(self)


class ConfigError(PdServeError):
    code = "config_error"


class ModelError(PdServeError):
    code = "model_error"


class RequestError(PdServeError):
    code = "invalid_request_error"
    http_status = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequestError(RequestError):
    code = "invalid_value"


class ContextLengthError(RequestError):
    code = "context_length_exceeded"


class AuthenticationError(RequestError):
    code = "invalid_api_key"
    http_status = 401


class NotFoundError(RequestError):
    code = "model_not_found"
    http_status = 404


class UnavailableError(PdServeError):
    code = "unavailable"
    http_status = 503
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OverloadedError(UnavailableError):
    code = "overloaded"
    http_status = 429


class NoWorkerError(UnavailableError):
    code = "no_worker"


class AttemptError(PdServeError):
    code = "attempt_failed"
    http_status = 503
    retryable = True


class NoCapacityError(AttemptError):
    code = "no_capacity"


class PreemptedError(AttemptError):
    code = "preempted"


class TransferError(AttemptError):
    code = "transfer_failed"


class PeerLostError(AttemptError):
    code = "peer_lost"


class EngineError(AttemptError):
    code = "engine_error"
    http_status = 500


class ProtocolError(PdServeError):
    code = "protocol_error"


class IncompatibleError(ProtocolError):
    code = "incompatible"


class StaleError(ProtocolError):
    code = "stale"


class TransportError(PdServeError):
    code = "transport_error"


class TransportUnavailableError(TransportError):
    code = "transport_unavailable"


class OutOfBoundsError(TransportError):
    code = "out_of_bounds"
