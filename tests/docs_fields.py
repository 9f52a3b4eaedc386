"""The table of request fields in docs/api.md: what each endpoint does with each, as the models that parse them say."""

from __future__ import annotations

import json

from pd_serve.protocol.openai import ChatCompletionRequest, CompletionRequest, SampledRequest
from pd_serve.protocol.openai_response_api import ResponseRequest

ENDPOINTS: dict[str, type[SampledRequest]] = {
    "chat": ChatCompletionRequest,
    "completions": CompletionRequest,
    "responses": ResponseRequest,
}


def fields_table() -> str:
    names = sorted({name for model in ENDPOINTS.values() for name in (*model.model_fields, *model.off, *model.ignored)})
    lines = [f"| field | {' | '.join(ENDPOINTS)} |", "|---|" + "---|" * len(ENDPOINTS)]
    lines += [f"| `{name}` | {' | '.join(state_of(model, name) for model in ENDPOINTS.values())} |" for name in names]
    return "\n".join(lines) + "\n"


def state_of(model: type[SampledRequest], name: str) -> str:
    """As a cell; a field that none of these is refused as unknown."""
    if name in model.model_fields:
        return "served"
    if name in model.ignored:
        return "ignored"
    if name not in model.off:
        return ""
    off = ", ".join(f"`{json.dumps(value)}`" for value in model.off[name])
    return f"refused but for {off}" if off else "refused"
