"""Answers have the shapes that were recorded, colocated and disaggregated alike."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from openai.types import Completion

from pd_serve.protocol.link import Role
from tests.conformance.asked import ASKED, ask, shapes_of, without_what_differs
from tests.conformance.shapes import recorded, shape_of, strictly
from tests.fakes_worker import Board, mock_worker
from tests.unit.router.elsewhere import serving_elsewhere


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving_elsewhere(tmp_path_factory.mktemp("colocated")) as here, httpx.Client(base_url=here.url, verify=False) as http:
        yield http


@pytest.fixture(scope="module")
def disaggregated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    board = Board()
    workers = (mock_worker("prefill-0", Role.PREFILL, board=board), mock_worker("decode-0", Role.DECODE, board=board))
    folder = tmp_path_factory.mktemp("disaggregated")
    with serving_elsewhere(folder, *workers) as here, httpx.Client(base_url=here.url, verify=False) as http:
        yield http


def test_shapes_are_those_recorded(colocated: httpx.Client) -> None:
    shapes = shapes_of(colocated)
    expected = recorded()
    assert shapes.keys() == expected.keys()
    for name, shape in shapes.items():
        assert shape == expected[name], f"{name}: python -m tests.conformance.record"


@pytest.mark.parametrize("name", [name for name in ASKED if name not in ("models", "version")])
def test_colocated_and_disaggregated_say_the_same(colocated: httpx.Client, disaggregated: httpx.Client, name: str) -> None:
    assert without_what_differs(ask(colocated, name)) == without_what_differs(ask(disaggregated, name))


def test_a_field_too_many_a_wrong_type_and_another_shape_are_noticed() -> None:
    good = '{"id":"a","choices":[],"created":1,"model":"m","object":"text_completion"}'
    strictly(Completion, good)
    for bad in (good.replace('"id"', '"idea":1,"id"'), good.replace("1", '"1"'), good.replace('"id":"a",', "")):
        with pytest.raises(AssertionError):
            strictly(Completion, bad)
    assert shape_of({"a": [{"b": 1}, {"b": None}], "c": {}, "d": []}) == {"$.a[].b": "null|number", "$.c": "object", "$.d": "array"}
