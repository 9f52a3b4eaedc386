"""POST /v1/completions: text, token ids, or lists of either; choices are numbered prompt by prompt."""

from __future__ import annotations

from dataclasses import dataclass

from pd_serve.protocol.openai import CompletionRequest, parse_completion
from router.api.generate import GenerationEndpoint, Texts, new_response_id, now_s, prepared_prompt
from router.choice import completion_logprobs
from router.exchange import AnswerPlan, ChoiceState, PreparedPrompt
from router.services import Services
from router.sse import CompletionEvents, event_head
from router.tokenizer import TextCodec
from router.whole import UsageCounts, WholeHead, completion_choice_json, whole_json


class _CompletionPlanner:
    def parse(self, body: bytes) -> CompletionRequest:
        return parse_completion(body)

    def texts(self, services: Services, request: CompletionRequest) -> Texts:
        limits = services.limits()
        texts = tuple([prompt for prompt in request.prompts if isinstance(prompt, str)])
        for text in texts:
            limits.check_text(len(text), "prompt")
        return Texts(texts, add_special_tokens=True)

    def plan(self, services: Services, request: CompletionRequest, encoded: tuple[tuple[int, ...], ...]) -> AnswerPlan:
        limits = services.limits()
        prompts: list[PreparedPrompt] = []
        echoes: list[str] = []
        texts = iter(encoded)
        for prompt in request.prompts:
            token_ids = next(texts) if isinstance(prompt, str) else prompt
            limits.check_prompt(token_ids, "prompt")
            prompts.append(prepared_prompt(request, limits, token_ids, request.output_limit, request.num_logprobs))
            echo = ""
            if request.echo:
                echo = prompt if isinstance(prompt, str) else services.codec.decode(token_ids)
            echoes += [echo] * request.n
        response_id, created = new_response_id("cmpl"), now_s()
        events = None
        if request.stream:
            head = event_head(response_id, "text_completion", created, services.model_name)
            events = CompletionEvents(services.codec, head, request.include_usage, tuple(echoes))
        builder = _CompletionBuilder(services.codec, response_id, created, services.model_name, request.logprobs is not None, tuple(echoes))
        return AnswerPlan(response_id, tuple(prompts), request.stop, builder, events, request.include_usage)


def completions_endpoint() -> GenerationEndpoint[CompletionRequest]:
    return GenerationEndpoint(_CompletionPlanner())


@dataclass(frozen=True, slots=True)
class _CompletionBuilder:
    codec: TextCodec
    response_id: str
    created: int
    model: str
    has_logprobs: bool
    echoes: tuple[str, ...]

    def whole(self, choices: list[ChoiceState], usage: UsageCounts) -> bytes:
        head = WholeHead(self.response_id, "text_completion", self.created, self.model)
        return whole_json(head, [self._choice(index, choice) for index, choice in enumerate(choices)], usage)

    def _choice(self, index: int, choice: ChoiceState) -> bytes:
        text = "".join([self.echoes[index], *[piece.text for piece in choice.pieces]])
        logprobs = completion_logprobs(self.codec, choice.pieces, 0).model_dump_json().encode() if self.has_logprobs else b"null"
        return completion_choice_json(index, text, logprobs, choice.text.finish_reason or "stop")
