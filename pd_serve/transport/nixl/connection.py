"""What two agents of NIXL say to each other besides messages, and what one knows of a connection to another. See agent.py."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import msgspec

FRAME = struct.Struct("<BHI")
"""Channel, length of the header that follows, stream of the sender; then the header and the payload."""
CREDIT = struct.Struct("<BIQQ")
"""Stream, its data messages that were handled, and the number in the sign of life that this answers (or 0)."""
LIFE = struct.Struct("<BIQ")
"""Stream, and how many data messages went before. Of a connection that owes nothing the channel alone."""
CREDIT_CHANNEL = 0x50
LIFE_CHANNEL = 0x4F


class AgentAddress(msgspec.Struct, frozen=True, array_like=True):
    name: str
    doorbell: tuple[str, int]
    metadata: bytes
    """Connection information of NIXL; no key of any memory."""


@dataclass(slots=True, eq=False)
class Remote:
    """A connection to another agent, shared by all endpoints that lead to it."""

    name: str
    doorbell: tuple[str, int]
    num_endpoints: int = 0
    failure: str | None = None
    handled: dict[int, int] = field(default_factory=dict)
    """{stream of the other side: its data messages that were handled here}."""
    uncredited: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Transfer:
    """A WRITE under way."""

    remote: Remote
    handle: int
    is_done: bool = False
