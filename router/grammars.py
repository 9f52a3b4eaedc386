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
        compiling = self._thread.submit(problem_of, grammar)
        loop = asyncio.get_running_loop()
        self._num_waiting += 1
        compiling.add_done_callback(lambda _: loop.call_soon_threadsafe(self._has_ended))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(compiling), self._settings.compile_timeout_s)
        except TimeoutError:
            if compiling.cancelled():
                raise OverloadedError("others' grammars are being compiled") from None
            message = f"'{param}' takes longer than {self._settings.compile_timeout_s:g} s to compile"
            raise InvalidRequestError(message, param) from None

    def _has_ended(self) -> None:
        self._num_waiting -= 1
