"""GET /openapi.json: this router's routes as OpenAPI 3.1, written from the models that parse and make what it describes.

The framework describes its own routes; the generation routes bypass it and are described here. No key is asked for: it is the same for
every router of this version and settings. Source: https://spec.openapis.org/oas/v3.1.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from pd_serve import __version__
from pd_serve.config import RouterConfig, SecurityConfig
from pd_serve.protocol.admin import ADMIN_WORKERS_PATH
from pd_serve.protocol.control import REGISTER_PATH, RegisterWorker
from pd_serve.protocol.openai import ChatCompletionRequest, CompletionRequest, ErrorResponse
from pd_serve.protocol.openai_response_answers import ResponseObject
from pd_serve.protocol.openai_response_api import ResponseRequest
from pd_serve.protocol.openai_responses import ChatCompletion, Completion
from pd_serve.protocol.openai_tokens import DetokenizeRequest, TokenizeRequest
from router.api.admin import BODIES, ROLE_PATH
from router.api.tokens import DETOKENIZE_PATH, TOKENIZE_PATH

OPENAPI_PATH = "/openapi.json"
_REF = "#/components/schemas/{model}"
_GENERATION: Mapping[str, tuple[type[BaseModel], type[BaseModel], str]] = {
    "/v1/chat/completions": (ChatCompletionRequest, ChatCompletion, "Answer a conversation"),
    "/v1/completions": (CompletionRequest, Completion, "Continue one text, or several"),
    "/v1/responses": (ResponseRequest, ResponseObject, "Answer an input; nothing is stored"),
}
_BODIES: Mapping[str, type[BaseModel]] = {
    REGISTER_PATH: RegisterWorker,
    TOKENIZE_PATH: TokenizeRequest,
    DETOKENIZE_PATH: DetokenizeRequest,
}
"""Of routes that parse their bodies themselves."""
_SECRET_PATHS = ("/internal/", ADMIN_WORKERS_PATH)
_OPEN_PATHS = ("/health", "/ready", "/metrics", "/version")
_REFUSALS: Mapping[int, str] = {
    400: "The request cannot be served as written",
    401: "No key, or a wrong one",
    404: "No such model",
    408: "The request did not arrive in time",
    413: "The body is too large",
    429: "Too many requests are in progress; try again after `retry-after` seconds",
    431: "The headers are too large",
    500: "The engine, or this server, failed",
    503: "No worker can take it now; try again after `retry-after` seconds",
}


def openapi_route(routes: Sequence[BaseRoute], router: RouterConfig, security: SecurityConfig) -> Route:
    """The document of `routes` is made once, here."""
    document = openapi_document(routes, router, security)

    async def answer(request: Request) -> JSONResponse:
        return JSONResponse(document)

    return Route(OPENAPI_PATH, answer, methods=["GET"])


def openapi_document(routes: Sequence[BaseRoute], router: RouterConfig, security: SecurityConfig) -> dict[str, Any]:
    document = get_openapi(title="pd-serve", version=__version__, routes=routes)
    paths: dict[str, Any] = document["paths"]
    schemas: dict[str, Any] = document.setdefault("components", {}).setdefault("schemas", {})
    for path, (request, answer, summary) in _GENERATION.items():
        paths[path] = {"post": _generation(request, answer, summary)}
    _add_models(schemas, "validation", *(request for request, _, _ in _GENERATION.values()), *_BODIES.values())
    _add_models(schemas, "serialization", *(answer for _, answer, _ in _GENERATION.values()), ErrorResponse)
    _narrow(schemas, router)
    _describe_admin(paths, schemas)
    for path, body in _BODIES.items():
        paths[path]["post"]["requestBody"] = _json_body(body)
    document["components"]["securitySchemes"] = {name: {"type": "http", "scheme": "bearer"} for name in ("key", "secret")}
    for path, methods in paths.items():
        is_internal = path.startswith(_SECRET_PATHS)
        for operation in methods.values():
            if path not in _OPEN_PATHS:
                operation["responses"] |= {str(status): _json(ErrorResponse, text) for status, text in _REFUSALS.items()}
                asks = security.cluster_secret if is_internal else security.client_keys
                operation["security"] = [{"secret" if is_internal else "key": []}] if asks else []
            operation["responses"].pop("422", None)  # what the framework would answer; ours is 400
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return document


def _generation(request: type[BaseModel], answer: type[BaseModel], summary: str) -> dict[str, Any]:
    done = _json(answer, "The whole answer, or with `stream` its parts as they come, ended by `data: [DONE]`")
    done["content"]["text/event-stream"] = {}
    return {"summary": summary, "requestBody": _json_body(request), "responses": {"200": done}}


def _describe_admin(paths: dict[str, Any], schemas: dict[str, Any]) -> None:
    _add_models(schemas, "validation", *BODIES.values())
    for path, model in BODIES.items():
        paths[path]["post"]["requestBody"] = _json_body(model)
    paths[ROLE_PATH]["post"]["responses"]["409"] = _json(ErrorResponse, "No worker that decodes would be left")


def _json(model: type[BaseModel], description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}}


def _json_body(model: type[BaseModel]) -> dict[str, Any]:
    return {"required": True, "content": _json(model, "")["content"]}


def _add_models(schemas: dict[str, Any], mode: JsonSchemaMode, *models: type[BaseModel]) -> None:
    _, made = models_json_schema([(model, mode) for model in models], ref_template=_REF)
    schemas |= made["$defs"]


def _narrow(schemas: dict[str, Any], router: RouterConfig) -> None:
    """The limits as configured, where they are below what the models allow."""
    for name in ("ChatCompletionRequest", "CompletionRequest", "ResponseRequest"):
        properties = schemas[name]["properties"]
        if "n" in properties:
            properties["n"]["anyOf"][0]["maximum"] = router.max_n
        properties["logit_bias"]["anyOf"][0]["maxProperties"] = router.max_logit_bias
        one, several = properties["stop"]["anyOf"][:2]
        one["maxLength"] = several["items"]["maxLength"] = router.max_stop_string_length
        several["maxItems"] = router.max_stop_strings
    schemas["ChatCompletionRequest"]["properties"]["messages"]["maxItems"] = router.max_messages
