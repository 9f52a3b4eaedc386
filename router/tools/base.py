"""What the formats of tool calls have in common: how they are told from text, and to whom they report."""

from __future__ import annotations

from typing import Protocol

from router.tools.reading import Reading


class Calls(Protocol):
    """Told what a format reads. From `begin` on, the call is the client's and cannot be taken back."""

    def knows(self, name: str) -> bool:
        """The client has told of a function of this name."""
        ...

    def begin(self, name: str) -> None: ...

    def arguments(self, text: str) -> None:
        """Of the call begun last: more of its JSON, as it was just read."""
        ...

    def end(self) -> None:
        """The call begun last is complete, and what was read up to here is part of it."""
        ...


class CallFormat(Protocol):
    """One way of models to write calls. Made once; holds no state."""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts that may be special tokens, which are no text otherwise."""
        ...

    @property
    def has_short_ids(self) -> bool:
        """Its chat template takes ids of nine letters and digits only."""
        ...

    def markers(self, is_start: bool) -> tuple[str, ...]:
        """Texts, without white space and none the beginning of another, with which calls begin. `is_start`: nothing was said before."""
        ...

    def read(self, marker: str, calls: Calls) -> Reading:
        """What follows a marker. Raises NotACallError at the first character that does not fit; ends after the last that does."""
        ...
