"""Which formats of calls and reasoning this model has: as configured, or told from its chat template. Made once per router process."""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from pd_serve.config import ModelConfig
from pd_serve.errors import InvalidRequestError
from pd_serve.protocol.openai import ChatCompletionRequest
from pd_serve.protocol.openai_tools import NamedToolChoice
from router.chat_template import ChatTemplate
from router.tokenizer import TextCodec
from router.tools.base import CallFormat
from router.tools.deepseek import DeepSeekFormat
from router.tools.forced import NamedCallFormat, RequiredCallsFormat
from router.tools.hermes import HermesFormat
from router.tools.llama3 import Llama3Format
from router.tools.mistral import MistralFormat
from router.tools.parser import CallParser
from router.tools.reasoning import BEGIN, END, ReasoningSplitter
from router.tools.text import ParsedText

FORMATS: Mapping[str, CallFormat] = {
    "hermes": HermesFormat(),
    "llama3": Llama3Format(),
    "mistral": MistralFormat(),
    "deepseek": DeepSeekFormat(),
}
_TOLD_BY: Mapping[str, tuple[str, ...]] = {
    "deepseek": ("<｜tool▁call▁begin｜>",),
    "mistral": ("[TOOL_CALLS]",),
    "llama3": ("<|python_tag|>", "Environment: ipython", '"parameters": dictionary of argument name'),
    "hermes": ("<tool_call>",),
}
"""Texts in chat templates; the first format of which one is there is the model's."""
_OTHER_XML = "<function="
"""Qwen3-Coder's calls stand in the same frame as Hermes', but are no JSON."""
_REASONING_TAIL = 16
"""Tokens at the end of a prompt in which reasoning may be opened, or opened and closed at once."""

_drawing = random.Random(secrets.randbits(256))


@dataclass(frozen=True, slots=True)
class ChoiceParsing:
    """How the choices of one request are read; router.exchange's Parsing."""

    codec: TextCodec
    form: CallFormat | None
    names: frozenset[str]
    max_calls: int
    """0: as many as the model makes."""
    has_reasoning: bool
    is_reasoning_open: bool

    @property
    def ends_early(self) -> bool:
        return self.max_calls > 0

    def text(self, stops: tuple[str, ...], min_tokens: int) -> ParsedText:
        calls = None
        if self.form is not None:
            new_id = _new_short_id if self.form.has_short_ids else _new_call_id
            calls = CallParser(self.form, self.names, self.max_calls, new_id)
        reasoning = ReasoningSplitter(self.is_reasoning_open) if self.has_reasoning else None
        return ParsedText(self.codec, stops, min_tokens, reasoning, calls)


class OutputFormats:
    """Of one model. `tool_format`: None: not known, or none is wanted."""

    def __init__(self, model: ModelConfig, codec: TextCodec) -> None:
        template = codec.chat_template
        name = _tool_format_of(template) if model.tool_parser == "auto" else model.tool_parser
        self.tool_format = FORMATS.get(name)
        self._reasoning = _reasoning_of(template) if model.reasoning_parser == "auto" else model.reasoning_parser
        self._codec = codec
        self._answers = codec.keeping((BEGIN, END)) if self.has_reasoning else codec
        special = () if self.tool_format is None else self.tool_format.special_tokens
        self._calls = codec.keeping((*special, BEGIN, END) if self.has_reasoning else special)

    @property
    def has_reasoning(self) -> bool:
        return self._reasoning != "none"

    def check(self, request: ChatCompletionRequest) -> None:
        """Before the prompt is made. Raises InvalidRequestError for tools whose calls could not be read."""
        if has_tools(request) and self.tool_format is None and _forced_format(request) is None:
            raise InvalidRequestError(
                "it is not known how this model writes calls of tools: the server's setting model.tool_parser has to say so", "tools"
            )

    def parsing(self, request: ChatCompletionRequest, prompt: tuple[int, ...]) -> ChoiceParsing | None:
        """None: all that the model says is content, as it is."""
        forced = _forced_format(request)
        if forced is not None:
            return ChoiceParsing(self._codec, forced, frozenset(), 0, False, False)
        has_calls = has_tools(request)
        # A grammar holds from the first token on: there is nothing but the answer, even where the prompt opens reasoning.
        has_reasoning = self.has_reasoning and request.form is None
        is_open = False
        if has_reasoning:
            tail = self._answers.decode(prompt[-_REASONING_TAIL:]).rstrip()
            is_open = tail.endswith(BEGIN) or self._reasoning == "deepseek_r1"
            has_reasoning = not tail.endswith(END)
        if not has_calls and not has_reasoning:
            return None
        names = frozenset(tool.function.name for tool in request.tools)
        max_calls = 0 if request.parallel_tool_calls or not has_calls else 1
        codec = self._calls if has_calls else self._answers
        return ChoiceParsing(codec, self.tool_format if has_calls else None, names, max_calls, has_reasoning, is_open)


def has_tools(request: ChatCompletionRequest) -> bool:
    """There are some, and the model may call them."""
    return bool(request.tools) and request.tool_choice != "none"


def _forced_format(request: ChatCompletionRequest) -> CallFormat | None:
    """Of calls that are asked for: a grammar makes the model write them so, without reasoning before."""
    if isinstance(request.tool_choice, NamedToolChoice):
        return NamedCallFormat(request.tool_choice.function.name)
    return RequiredCallsFormat() if request.tool_choice == "required" else None


def _tool_format_of(template: ChatTemplate | None) -> str:
    """A model whose template does not know tools is told of them in Hermes' words."""
    if template is None:
        return "none"
    if not template.knows_tools:
        return "hermes"
    found = next((name for name, texts in _TOLD_BY.items() if any(text in template.source for text in texts)), "none")
    return "none" if found == "hermes" and _OTHER_XML in template.source else found


def _reasoning_of(template: ChatTemplate | None) -> str:
    return "qwen3" if template is not None and END in template.source else "none"


def _new_call_id() -> str:
    return f"call_{_drawing.getrandbits(96):024x}"


def _new_short_id() -> str:
    return f"{_drawing.getrandbits(36):09x}"
