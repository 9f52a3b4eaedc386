"""Looks at the grammar of a request before any worker hears of it. One per router process.

Compiling takes milliseconds and its work is counted by the library, but it is a client's text: it is done on a thread, for so long at most,
one at a time. What has been found good is remembered: clients ask in the same form again and again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from pd_serve.config import StructuredConfig
from pd_serve.errors import InvalidRequestError, OverloadedError
from pd_serve.grammar.base import Grammar
from pd_serve.grammar.compiler import problem_of
from pd_serve.protocol.openai_formats import AskedForm

NUM_REMEMBERED = 256
MAX_WAITING = 64
"""Grammars that wait for the thread; more are too many."""
_MAX_MESSAGE_LENGTH = 500
_FAIR_SHARE = 0.9
"""Of the time that a grammar may take: one that had to wait, and then ran for less, is not to blame."""


class GrammarChecks:
    """Used on the event loop."""

    def __init__(self, settings: StructuredConfig, has_vocabulary: bool) -> None:
        """`has_vocabulary`: the tokens' texts are known, so that workers know them too."""
        self._settings = settings
        self._has_vocabulary = has_vocabulary
        self._known: OrderedDict[Grammar, None] = OrderedDict()
        self._num_waiting = 0
        self._thread = ThreadPoolExecutor(1, "grammar-check")

    def knows(self, form: AskedForm) -> bool:
        """It has been found good."""
        if form.grammar not in self._known:
            return False
        self._known.move_to_end(form.grammar)
        return True

    async def check(self, form: AskedForm) -> None:
        """Raises InvalidRequestError that names the field, OverloadedError."""
        grammar, param = form
        if not self._has_vocabulary:
            raise InvalidRequestError(f"'{param}' needs the model's tokenizer.json, without which this server runs", param)
        nbytes = len(grammar.text.encode("utf-8", "surrogatepass"))
        if nbytes > self._settings.max_bytes:
            raise InvalidRequestError(f"'{param}' may have at most {self._settings.max_bytes} bytes, but has {nbytes}", param)
        if self.knows(form):
            return
        problem = await self._problem_of(grammar, param)
        if problem:
            raise InvalidRequestError(f"Invalid value for '{param}': {' '.join(problem.split())[:_MAX_MESSAGE_LENGTH]}", param)
        self._known[grammar] = None
        if len(self._known) > NUM_REMEMBERED:
            self._known.popitem(last=False)

    async def _problem_of(self, grammar: Grammar, param: str) -> str:
        if self._num_waiting >= MAX_WAITING:
            raise OverloadedError("too many grammars wait to be compiled")
        loop = asyncio.get_running_loop()
        limit_s = self._settings.compile_timeout_s
        had_to_wait = self._num_waiting > 0
        began_at: list[float] = []

        def compile_now() -> str:
            began_at.append(loop.time())
            return problem_of(grammar)

        compiling = self._thread.submit(compile_now)
        self._num_waiting += 1
        compiling.add_done_callback(lambda _: loop.call_soon_threadsafe(self._has_ended))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(compiling), limit_s)
        except TimeoutError:
            if not began_at or (had_to_wait and loop.time() - began_at[0] < _FAIR_SHARE * limit_s):
                raise OverloadedError("others' grammars are being compiled") from None
            message = f"'{param}' takes longer than {limit_s:g} s to compile"
            raise InvalidRequestError(message, param) from None

    def _has_ended(self) -> None:
        self._num_waiting -= 1
