"""Who asks: tenants by their keys, with weight, rate limits and the most urgent class they may use. Made once from the configuration.

A key is never shown: a tenant goes by its configured name, or by the beginning of the key's digest. Without keys there is one tenant.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pd_serve.config import Config
from pd_serve.errors import AuthenticationError, ConfigError, InvalidRequestError, UnavailableError
from router.occupancy import Occupancy
from router.rates import Bucket, shown_duration

NUM_CELLS = 2
"""By tenant: requests, tokens."""
_NAMES = ("requests", "tokens")


class RateLimitError(UnavailableError):
    """`headers`: what the client is told of its limits. Never fits: `retry_after_s` is infinite."""

    code = "rate_limit_exceeded"
    http_status = 429

    def __init__(self, message: str, retry_after_s: float, headers: tuple[tuple[str, str], ...]) -> None:
        super().__init__(message, retry_after_s)
        self.headers = headers


@dataclass(frozen=True, slots=True, eq=False)
class Tenant:
    """One key, or several of one name."""

    name: str
    weight: float = 1.0
    ceiling: int = 0
    """Number of the most urgent class it may use."""
    buckets: tuple[Bucket | None, Bucket | None] = (None, None)
    """Requests and tokens per minute; None: no limit."""

    @property
    def is_limited(self) -> bool:
        return self.buckets != (None, None)

    def limit_headers(self, now: float) -> tuple[tuple[str, str], ...]:
        """As OpenAI names them. Source: https://platform.openai.com/docs/guides/rate-limits (headers)."""
        found: list[tuple[str, str]] = []
        for name, bucket in zip(_NAMES, self.buckets, strict=True):
            if bucket is not None:
                found.append((f"x-ratelimit-limit-{name}", str(bucket.limit)))
                found.append((f"x-ratelimit-remaining-{name}", str(bucket.remaining(now))))
                found.append((f"x-ratelimit-reset-{name}", shown_duration(bucket.reset_s(now))))
        return tuple(found)


ANYBODY = Tenant("anybody")


@dataclass(frozen=True, slots=True)
class Ticket:
    """Who asks, and how urgently. One per client request."""

    tenant: Tenant = ANYBODY
    rank: int = 0
    """Number of its class; 0 is the most urgent."""
    session: str = ""
    """Its requests go to one worker where that can be (policy/session.py); empty: none was named."""


NO_TICKET = Ticket()


class Tenants:
    """ticket() of a request's headers -> charge() its prompt -> spent() its answer."""

    def __init__(
        self,
        config: Config,
        occupancy: Occupancy,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`occupancy`: has what the limits have left, for all processes of the router. Raises ConfigError."""
        overload, security = config.overload, config.security
        self._now = now
        self._classes = {name: rank for rank, name in enumerate(overload.classes)}
        if overload.default_class not in self._classes:
            raise ConfigError(f"overload.default_class = {overload.default_class!r} is none of {', '.join(overload.classes)}")
        self._usual_rank = self._classes[overload.default_class]
        self._header = overload.priority_header
        self.priority_header = self._header.encode()
        usual_limits = overload.requests_per_minute, overload.tokens_per_minute
        made: dict[str, Tenant] = {}

        def tenant(name: str, weight: float, limits: Sequence[int], ceiling: str) -> Tenant:
            if name not in made:
                if ceiling and ceiling not in self._classes:
                    raise ConfigError(f"security.tenants: priority {ceiling!r} of {name} is none of {', '.join(self._classes)}")
                first = NUM_CELLS * len(made)
                requests, tokens = [
                    Bucket(own or usual, occupancy.cells, first + index, occupancy.locked) if own or usual else None
                    for index, (own, usual) in enumerate(zip(limits, usual_limits, strict=True))
                ]
                made[name] = Tenant(name, weight, self._classes.get(ceiling, 0), (requests, tokens))
            return made[name]

        self._by_digest: dict[bytes, Tenant] = {}
        for entry in security.tenants:
            self._by_digest[_digest(entry.key)] = tenant(
                entry.name, entry.weight, (entry.requests_per_minute, entry.tokens_per_minute), entry.priority
            )
        for key in security.api_keys:
            self._by_digest.setdefault(_digest(key), tenant(_name_of(key), 1.0, (0, 0), ""))
        self._anybody = None if self._by_digest else tenant(ANYBODY.name, 1.0, (0, 0), "")
        assert tuple(made) == tenant_names(config)

    def ticket(self, authorization: str | None, priority: str | None = None) -> Ticket:
        """Raises AuthenticationError, InvalidRequestError for a class that is none, and RateLimitError when it asks too often."""
        tenant = self._tenant(authorization)
        rank = self._usual_rank
        if priority is not None:
            known = self._classes.get(priority.strip().lower())
            if known is None:
                raise InvalidRequestError(f"'{self._header}' must be one of: {', '.join(self._classes)}", self._header)
            rank = known
        requests = tenant.buckets[0]
        if requests is not None and (wait_s := requests.take(1, now := self._now())):
            raise self._exceeded(tenant, "requests", requests, wait_s, now)
        return Ticket(tenant, max(rank, tenant.ceiling))

    def charge(self, ticket: Ticket, num_prompt_tokens: int) -> None:
        """Raises RateLimitError, and then the request does not count either."""
        tokens = ticket.tenant.buckets[1]
        if tokens is not None and (wait_s := tokens.take(num_prompt_tokens, now := self._now())):
            self.spent(ticket, 0, num_requests=-1)
            raise self._exceeded(ticket.tenant, "tokens", tokens, wait_s, now)

    def spent(self, ticket: Ticket, num_tokens: int, num_requests: int = 0) -> None:
        """More tokens than were charged, or negative: what was charged and not used."""
        for bucket, num in zip(ticket.tenant.buckets, (num_requests, num_tokens), strict=True):
            if bucket is not None and num:
                bucket.overdraw(num, self._now())

    def header_lines(self, ticket: Ticket) -> bytes:
        """Whole lines; empty where nothing is limited."""
        if not ticket.tenant.is_limited:
            return b""
        return "".join([f"{name}: {value}\r\n" for name, value in ticket.tenant.limit_headers(self._now())]).encode()

    def _tenant(self, authorization: str | None) -> Tenant:
        if self._anybody is not None:
            return self._anybody
        scheme, _, given = (authorization or "").partition(" ")
        tenant = self._by_digest.get(_digest(given.strip())) if scheme.lower() == "bearer" else None
        if tenant is None:
            raise AuthenticationError("Incorrect API key provided" if authorization else "You did not provide an API key")
        return tenant

    def _exceeded(self, tenant: Tenant, what: str, bucket: Bucket, wait_s: float, now: float) -> RateLimitError:
        if wait_s == float("inf"):
            message = f"Request too large for {tenant.name}: the limit is {bucket.limit} {what} per minute, which it exceeds by itself"
        else:
            message = (
                f"Rate limit reached for {tenant.name} on {what} per minute: limit {bucket.limit}. Try again in {shown_duration(wait_s)}"
            )
        return RateLimitError(message, wait_s, tenant.limit_headers(now))


def num_cells(config: Config) -> int:
    """Numbers that the limits of all tenants need."""
    return NUM_CELLS * len(tenant_names(config))


def tenant_names(config: Config) -> tuple[str, ...]:
    """Of every tenant there is, each once."""
    security = config.security
    names = [*(entry.name for entry in security.tenants), *(_name_of(key) for key in security.api_keys)]
    return tuple(dict.fromkeys(names)) or (ANYBODY.name,)


def _name_of(key: str) -> str:
    return f"key-{_digest(key).hex()[:8]}"


def _digest(key: str) -> bytes:
    """Of a secret that is compared by it: how long a comparison takes says nothing about the key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
