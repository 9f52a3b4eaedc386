"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.routing import Route

from pd_serve.protocol.openai import ChatCompletionRequest, parse_chat
from pd_serve.protocol.openai_responses import AssistantMessage, ChatChoice, ChatCompletion, Usage
from router.api.generate import GenerationEndpoint, new_response_id, now_s, prepared_prompt, tokenize
from router.choice import chat_logprobs
from router.exchange import AnswerPlan, ChoiceState
from router.services import Services
from router.sse import ChatEvents, event_head
from router.tokenizer import TextCodec


async def _plan(services: Services, request: ChatCompletionRequest) -> AnswerPlan:
    limits = services.limits()
    limits.check_text(sum(len(message.text) for message in request.messages), "messages")
    text = services.codec.render_chat(request.messages, request.chat_template_kwargs)
    limits.check_text(len(text), "messages")
    token_ids = await tokenize(services.codec, text, add_special_tokens=False, num_chars=len(text))
    limits.check_prompt(token_ids, "messages")
    prompt = prepared_prompt(request, limits, token_ids, request.output_limit, request.num_logprobs)
    response_id, created = new_response_id("chatcmpl"), now_s()
    events = None
    if request.stream:
        head = event_head(response_id, "chat.completion.chunk", created, services.model_name)
        events = ChatEvents(services.codec, head, request.include_usage)
    builder = _ChatBuilder(services.codec, response_id, created, services.model_name, request.logprobs)
    return AnswerPlan(response_id, (prompt,), request.stop, builder, events, request.include_usage)


def chat_route() -> Route:
    return Route("/v1/chat/completions", GenerationEndpoint(parse_chat, _plan), methods=["POST"])


@dataclass(frozen=True, slots=True)
class _ChatBuilder:
    codec: TextCodec
    response_id: str
    created: int
    model: str
    has_logprobs: bool

    def whole(self, choices: list[ChoiceState], usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            id=self.response_id,
            created=self.created,
            model=self.model,
            choices=tuple(self._choice(index, choice) for index, choice in enumerate(choices)),
            usage=usage,
        )

    def _choice(self, index: int, choice: ChoiceState) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=AssistantMessage(content="".join(piece.text for piece in choice.pieces)),
            logprobs=chat_logprobs(self.codec, choice.pieces) if self.has_logprobs else None,
            finish_reason=choice.text.finish_reason or "stop",
        )
