"""POST /v1/responses, served as the chat it amounts to; GET /v1/responses/{id} and the like, which find nothing, as nothing is stored."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter, Request

from pd_serve.errors import RequestError
from pd_serve.protocol.openai_response_api import ResponseChat, as_response_error, parse_response
from router.api.chat import ChatPlanner
from router.api.errors import UnknownPathError
from router.api.generate import GenerationEndpoint, Texts, new_response_id, now_s
from router.exchange import AnswerPlan, ChoiceState
from router.response_draft import ResponseDraft
from router.response_events import ResponseEvents
from router.services import Services
from router.tokenizer import TextCodec
from router.whole import UsageCounts

router = APIRouter()


class _ResponsePlanner:
    def __init__(self) -> None:
        self._chat = ChatPlanner()

    def parse(self, body: bytes) -> ResponseChat:
        return parse_response(body)

    def texts(self, services: Services, request: ResponseChat) -> Texts:
        try:
            return self._chat.texts(services, request)
        except RequestError as error:
            raise as_response_error(error) from None

    def plan(self, services: Services, request: ResponseChat, encoded: tuple[tuple[int, ...], ...]) -> AnswerPlan:
        try:
            plan = self._chat.plan(services, request, encoded)
        except RequestError as error:
            raise as_response_error(error) from None
        draft = ResponseDraft(new_response_id("").removeprefix("-"), now_s(), services.model_name, request.asked)
        plan = plan._replace(response_id=draft.response_id, builder=_ResponseBuilder(services.codec, draft), include_usage=True)
        if not request.stream:
            return plan
        events = ResponseEvents(services.codec, draft)
        return plan._replace(events=events, done=b"", broken=events.broken)


def responses_endpoint() -> GenerationEndpoint[ResponseChat]:
    return GenerationEndpoint(_ResponsePlanner())


@dataclass(frozen=True, slots=True)
class _ResponseBuilder:
    codec: TextCodec
    draft: ResponseDraft

    def whole(self, choices: list[ChoiceState], usage: UsageCounts) -> bytes:
        (choice,) = choices
        has_run_out = choice.text.finish_reason == "length"
        items = self.draft.items(self.codec, choice.pieces, has_run_out)
        return self.draft.ended(items, has_run_out, usage).model_dump_json().encode()


@router.get("/v1/responses/{response_id:path}", include_in_schema=False)
@router.post("/v1/responses/{response_id:path}", include_in_schema=False)
@router.delete("/v1/responses/{response_id:path}", include_in_schema=False)
async def stored(request: Request, response_id: str) -> None:
    """Retrieve, cancel, delete, list its input: of none."""
    raise UnknownPathError(f"Response '{response_id}' is not here: responses are not stored by this server")
