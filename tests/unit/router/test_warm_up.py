from __future__ import annotations

from pathlib import Path

import pytest

from router.stand_in_tokenizer import StandInTokenizer
from router.tokenizer import FolderTokenizer
from router.warm_up import warm_up
from tests.fakes import write_tokenizer

REFUSING = "{{ raise_exception('system first') }}"


@pytest.mark.parametrize("template", ["{% for message in messages %}{{ message.content }}{% endfor %}", REFUSING, None])
def test_no_template_keeps_a_router_from_starting(tmp_path: Path, template: str | None) -> None:
    warm_up(FolderTokenizer(write_tokenizer(tmp_path, template)))


def test_a_stand_in_is_warmed_up_too() -> None:
    warm_up(StandInTokenizer(1000))
