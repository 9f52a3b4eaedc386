"""What a planted mistake is: one line of one file, changed. tests/mutations.py has them all and replays them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    path: str
    old: str
    """Occurs once in the file."""
    new: str
    test: str
    """The node that fails; without parameters: at least one of its cases does."""
