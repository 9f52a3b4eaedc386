"""Text of one choice in, content and calls out, as they become certain. What comes out depends on the text, not on its pieces.

    content: characters are the client's, but for white space and beginnings of a marker, which are held
    call:    after a marker, characters go to the format's reading. What it has not yet given out is kept, and becomes content again when
             they turn out to be no call; then the search for markers goes on behind the first character of that one

White space before a call and between calls is dropped; nothing else ever is.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from router.tools.base import CallFormat
from router.tools.parts import Part, PartList
from router.tools.reading import END, SPACE, NotACallError, Reading


class CallParser:
    """push() pieces of text, flush() once at their end. `max_calls`: after so many whole calls nothing is read any more; 0: no limit.

    Implements base.Calls for its format.
    """

    def __init__(self, form: CallFormat, names: Set[str], max_calls: int, new_call_id: Callable[[], str]) -> None:
        self._format = form
        self._names = names
        self._max_calls = max_calls
        self._new_call_id = new_call_id
        self._parts = PartList()
        self._reading: Reading | None = None
        self._kept: list[str] = []
        """What was read since the marker, or since the last that was given out."""
        self._is_unclaimed = False
        """No call has come of the marker yet: it is what was kept first."""
        self._space = ""
        self._marker = ""
        """As much of one as has come."""
        self._has_content = False
        self._is_behind_call = False
        self._num_ended = 0
        self.num_calls = 0

    @property
    def is_over(self) -> bool:
        """As many calls as may be are complete."""
        return 0 < self._max_calls <= self._num_ended

    def push(self, text: str) -> tuple[Part, ...]:
        for ch in text:
            self._take(ch)
        return self._parts.take()

    def flush(self) -> tuple[Part, ...]:
        while self._reading is not None:
            self._read(self._reading, END)
        marker, self._marker = self._marker, ""
        for ch in marker:
            self._content(ch)
        if self._space and not self._is_behind_call:
            self._parts.content(self._space)
        return self._parts.take()

    # ---- what a format tells (base.Calls)

    def knows(self, name: str) -> bool:
        return name in self._names

    def begin(self, name: str) -> None:
        self._parts.begun(self.num_calls, self._new_call_id(), name)
        self.num_calls += 1
        self._kept.clear()
        self._space = ""
        self._is_unclaimed = False
        self._is_behind_call = True

    def arguments(self, text: str) -> None:
        self._parts.arguments(self.num_calls - 1, text)
        self._kept.clear()

    def end(self) -> None:
        self._num_ended += 1
        self._kept.clear()

    # ---- characters

    def _take(self, ch: str) -> None:
        if self.is_over:
            return
        if self._reading is not None:
            self._read(self._reading, ch)
            return
        marker = self._marker + ch
        self._marker = ""
        while marker:
            possible = [known for known in self._format.markers(not self._has_content) if known.startswith(marker)]
            if marker in possible:
                self._begin_reading(marker)
                return
            if possible:
                self._marker = marker
                return
            self._content(marker[0])
            marker = marker[1:]

    def _content(self, ch: str) -> None:
        if ch in SPACE:
            self._space += ch
            return
        self._parts.content(self._space + ch)
        self._space = ""
        self._has_content = True
        self._is_behind_call = False

    def _begin_reading(self, marker: str) -> None:
        self._kept = list(marker)
        self._is_unclaimed = True
        self._reading = self._format.read(marker, self)
        next(self._reading)

    def _read(self, reading: Reading, ch: str) -> None:
        self._kept.append(ch)
        try:
            reading.send(ch)
        except StopIteration:
            self._reading = None
            self._kept.clear()
        except NotACallError:
            self._reading = None
            kept, self._kept = self._kept, []
            if self._is_unclaimed:
                self._content(kept[0])
                kept = kept[1:]
            for again in "".join(kept):
                self._take(again)
