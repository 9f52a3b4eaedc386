"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from fastapi import APIRouter, Request

from pd_serve.errors import AuthenticationError, NotFoundError
from pd_serve.protocol.openai_responses import ModelCard, ModelList
from router.admission import bearer_matches
from router.services import Services, services_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    services = authorized(request)
    return ModelList(data=(_card(services),))


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> ModelCard:
    services = authorized(request)
    if model_id != services.model_name:
        raise NotFoundError(f"The model `{model_id}` does not exist; this server has `{services.model_name}`", "model")
    return _card(services)


def authorized(request: Request) -> Services:
    """Raises AuthenticationError where keys are asked for and none of them came."""
    services = services_of(request)
    keys = tuple(key.encode() for key in services.config.security.client_keys)
    if keys and not bearer_matches(request.headers.get("authorization"), keys):
        raise AuthenticationError("Incorrect API key provided")
    return services


def _card(services: Services) -> ModelCard:
    return ModelCard(id=services.model_name, created=services.created, max_model_len=services.limits().max_context_tokens or None)
