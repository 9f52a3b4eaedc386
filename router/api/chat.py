"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import dataclass

from pd_serve.protocol.openai import ChatCompletionRequest, parse_chat
from router.api.generate import GenerationEndpoint, Texts, new_response_id, now_s, prepared_prompt
from router.choice import chat_logprobs
from router.exchange import AnswerPlan, ChoiceState
from router.services import Services
from router.sse import ChatEvents, event_head
from router.tokenizer import TextCodec
from router.tools.events import ParsedChatEvents, parsed_choice_json
from router.tools.registry import has_tools
from router.whole import UsageCounts, WholeHead, chat_choice_json, whole_json


class ChatPlanner:
    def parse(self, body: bytes) -> ChatCompletionRequest:
        return parse_chat(body)

    def texts(self, services: Services, request: ChatCompletionRequest) -> Texts:
        limits = services.limits()
        num_chars = sum([message.num_chars for message in request.messages])
        limits.check_text(num_chars, "messages")
        if has_tools(request):
            services.formats.check(request)
            limits.check_text(num_chars + sum([tool.num_chars for tool in request.tools]), "tools")
            text = services.codec.render_chat(request.messages, request.chat_template_kwargs, request.tools)
        else:
            text = services.codec.render_chat(request.messages, request.chat_template_kwargs)
        limits.check_text(len(text), "messages")
        return Texts((text,), add_special_tokens=False)

    def plan(self, services: Services, request: ChatCompletionRequest, encoded: tuple[tuple[int, ...], ...]) -> AnswerPlan:
        limits = services.limits()
        (token_ids,) = encoded
        limits.check_prompt(token_ids, "messages")
        prompt = prepared_prompt(request, limits, token_ids, request.output_limit, request.num_logprobs)
        response_id, created = new_response_id("chatcmpl"), now_s()
        parsing = services.formats.parsing(request, token_ids) if request.tools or services.formats.has_reasoning else None
        events = None
        if request.stream:
            head = event_head(response_id, "chat.completion.chunk", created, services.model_name)
            new_events = ChatEvents if parsing is None else ParsedChatEvents
            events = new_events(services.codec, head, request.include_usage)
        builder = _ChatBuilder(services.codec, response_id, created, services.model_name, request.logprobs, parsing is not None)
        return AnswerPlan(response_id, (prompt,), request.stop, builder, events, request.include_usage, parsing=parsing)


def chat_endpoint() -> GenerationEndpoint[ChatCompletionRequest]:
    return GenerationEndpoint(ChatPlanner())


@dataclass(frozen=True, slots=True)
class _ChatBuilder:
    codec: TextCodec
    response_id: str
    created: int
    model: str
    has_logprobs: bool
    is_parsed: bool

    def whole(self, choices: list[ChoiceState], usage: UsageCounts) -> bytes:
        head = WholeHead(self.response_id, "chat.completion", self.created, self.model)
        return whole_json(head, [self._choice(index, choice) for index, choice in enumerate(choices)], usage)

    def _choice(self, index: int, choice: ChoiceState) -> bytes:
        logprobs = chat_logprobs(self.codec, choice.pieces).model_dump_json().encode() if self.has_logprobs else b"null"
        if self.is_parsed:
            return parsed_choice_json(index, choice.pieces, logprobs, choice.text.finish_reason or "stop")
        text = "".join([piece.text for piece in choice.pieces])
        return chat_choice_json(index, text, logprobs, choice.text.finish_reason or "stop")
