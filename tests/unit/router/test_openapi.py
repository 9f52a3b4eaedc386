"""/openapi.json of the router, and requests made from it by Schemathesis: whatever comes, the answer is one that the document names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import checks
from schemathesis.generation import GenerationMode
from schemathesis.generation.case import Case
from schemathesis.schemas import APIOperation

from router.api.openapi import OPENAPI_PATH
from tests.unit.router.cluster import MODEL, Cluster
from tests.unit.router.elsewhere import serving_elsewhere

EXAMPLES = 8
"""Per operation."""
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
"""Not that all bad values are refused: JSON's "1" and 1.0 are taken for 1, as other servers do."""
LIMITS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"max_tokens": 2},
    "/v1/completions": {"max_tokens": 2},
    "/v1/responses": {"max_output_tokens": 2},
}
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore:Do not use the `random` module",  # it is the router in the other thread that does, now and then
)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with serving_elsewhere(tmp_path_factory.mktemp("openapi"), max_body_bytes=65536, max_messages=64, queue_timeout_s=1.0) as made:
        yield made


def operations(url: str) -> Iterator[APIOperation]:
    schema = schemathesis.openapi.from_url(url + OPENAPI_PATH)
    for operation in schema.get_all_operations():
        yield operation.ok()


def ask_all(url: str, mode: GenerationMode) -> dict[str, set[int]]:
    """Statuses seen, by path."""
    return {operation.path: _ask(operation, mode) for operation in operations(url)}


def _ask(operation: APIOperation, mode: GenerationMode) -> set[int]:
    statuses: set[int] = set()

    @seed(1)
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Case) -> None:
        if isinstance(case.body, dict) and "model" in case.body and mode is GenerationMode.POSITIVE:
            case.body |= {"model": MODEL} | LIMITS.get(operation.path, {})
            case.body.pop("max_completion_tokens", None)
        response = case.call(timeout=10)
        statuses.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    with contextlib.suppress(Unsatisfiable):  # nothing but the path: there is no wrong way to ask
        ask()
    return statuses


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["as described", "not as described"])
def test_every_answer_is_one_that_is_described(here: Cluster, mode: GenerationMode) -> None:
    seen = ask_all(here.url, mode)
    print(seen)
    assert httpx.get(here.url + "/ready").status_code == 200
