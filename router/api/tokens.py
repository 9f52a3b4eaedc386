"""POST /tokenize and /detokenize: text to this model's tokens and back, under the clients' keys."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from pd_serve.errors import InvalidRequestError, NotFoundError
from pd_serve.protocol.openai_responses import DetokenizeAnswer, TokenizeAnswer
from pd_serve.protocol.openai_tokens import TokenizeRequest, parse_detokenize, parse_tokenize
from router.admission import read_body
from router.api.generate import LONG_TEXT, Texts, tokenize
from router.api.glance import check_sizes
from router.api.models import authorized
from router.services import Services

TOKENIZE_PATH = "/tokenize"
DETOKENIZE_PATH = "/detokenize"

router = APIRouter()


@router.post(TOKENIZE_PATH)
async def tokenize_text(request: Request) -> TokenizeAnswer:
    services, body = await _asked(request)
    check_sizes(body, services.limits(), services.config.router)
    asked = parse_tokenize(body)
    _check_model(services, asked.model)
    (tokens,) = await tokenize(services.codec, _texts(services, asked))
    services.limits().check_fits(len(tokens), "prompt" if asked.messages is None else "messages")
    strs = None
    if asked.return_token_strs:
        strs = await asyncio.to_thread(_strs, services, tokens) if len(tokens) >= LONG_TEXT else _strs(services, tokens)
    return TokenizeAnswer(count=len(tokens), max_model_len=services.limits().max_context_tokens, tokens=tokens, token_strs=strs)


@router.post(DETOKENIZE_PATH)
async def detokenize(request: Request) -> DetokenizeAnswer:
    """Special tokens are shown."""
    services, body = await _asked(request)
    services.limits().check_fits(body.count(b","), "tokens")
    asked = parse_detokenize(body)
    services.limits().check_fits(len(asked.tokens), "tokens")
    _check_model(services, asked.model)
    vocab_size = services.limits().vocab_size
    if any(token >= vocab_size for token in asked.tokens):
        raise InvalidRequestError(f"'tokens' holds a token id that is not below the vocabulary size of {vocab_size}", "tokens")
    is_long = len(asked.tokens) >= LONG_TEXT
    return DetokenizeAnswer(prompt=await asyncio.to_thread(_text, services, asked.tokens) if is_long else _text(services, asked.tokens))


async def _asked(request: Request) -> tuple[Services, bytes]:
    services = authorized(request)
    return services, await read_body(request.scope, request.receive, services.config.router.max_body_bytes)


def _check_model(services: Services, model: str | None) -> None:
    if model is not None and model != services.model_name:
        raise NotFoundError(f"The model `{model}` does not exist; this server has `{services.model_name}`", "model")


def _texts(services: Services, asked: TokenizeRequest) -> Texts:
    limits = services.limits()
    if asked.messages is None:
        text, param, is_chat = asked.prompt or "", "prompt", False
    else:
        limits.check_text(sum([message.num_chars for message in asked.messages]), "messages")
        options = asked.chat_template_kwargs | {"add_generation_prompt": asked.add_generation_prompt}
        text, param, is_chat = services.codec.render_chat(asked.messages, options), "messages", True
    limits.check_text(len(text), param)
    return Texts((text,), not is_chat if asked.add_special_tokens is None else asked.add_special_tokens)


def _text(services: Services, tokens: tuple[int, ...]) -> str:
    return b"".join([services.codec.token_bytes(token) for token in tokens]).decode("utf-8", "replace")


def _strs(services: Services, tokens: tuple[int, ...]) -> tuple[str, ...]:
    return tuple([services.codec.token_bytes(token).decode("utf-8", "replace") for token in tokens])
