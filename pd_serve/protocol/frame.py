"""The base of every frame of the link (link.py)."""

from __future__ import annotations

import msgspec


class Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Base of every frame; the tag names the class."""
