from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from pd_serve.errors import InvalidRequestError, ModelError
from pd_serve.protocol.openai import Message, TextPart
from router.api.generate import LONG_TEXT, Texts, tokenize
from router.tokenizer import FolderTokenizer
from tests.fakes import write_tokenizer


def test_chat_template_is_rendered_with_its_tokens(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] }}:{{ m.content | trim }};{% if loop.index > 9 %}{% break %}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}>{% endif %}{{ extra | default('none') }}{{ {'ä': 1} | tojson }}"
    )
    codec = FolderTokenizer(write_tokenizer(tmp_path, template))
    messages = (
        Message(role="system", content=" s "),
        Message(role="user", content=(TextPart(type="text", text="u"), TextPart(type="text", text="v"))),
    )
    assert codec.render_chat(messages, {}) == '<|im_start|>system:s;user:uv;>none{"ä": 1}'
    assert codec.render_chat(messages, {"extra": "yes", "add_generation_prompt": False}).endswith(';yes{"ä": 1}')


def test_special_tokens_in_a_template_are_single_tokens(tmp_path: Path) -> None:
    codec = FolderTokenizer(write_tokenizer(tmp_path))
    ids = codec.encode(codec.render_chat((Message(role="user", content="x"),), {}), add_special_tokens=False)
    assert ids[0] == 1
    assert 0 in ids


def test_template_that_refuses_is_a_bad_request(tmp_path: Path) -> None:
    codec = FolderTokenizer(write_tokenizer(tmp_path, "{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(InvalidRequestError, match="alternate"):
        codec.render_chat((Message(role="user", content="x"),), {})


def test_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    codec = FolderTokenizer(write_tokenizer(tmp_path, "{{ messages.__class__.__mro__[1].__subclasses__() }}"))
    with pytest.raises(InvalidRequestError):
        codec.render_chat((Message(role="user", content="x"),), {})


def test_folder_without_template_serves_completions_only(tmp_path: Path) -> None:
    codec = FolderTokenizer(write_tokenizer(tmp_path, None))
    assert codec.encode("x", True)
    with pytest.raises(InvalidRequestError, match="completions"):
        codec.render_chat((Message(role="user", content="x"),), {})


def test_template_file_and_named_templates(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, None)
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert FolderTokenizer(tmp_path).render_chat((Message(role="user", content="x"),), {}) == "D"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert FolderTokenizer(tmp_path).render_chat((Message(role="user", content="x"),), {}) == "F"


def test_damaged_folders_are_model_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        FolderTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError):
        FolderTokenizer(tmp_path)
    write_tokenizer(tmp_path, "{% broken")
    with pytest.raises(ModelError, match="template"):
        FolderTokenizer(tmp_path)


def test_router_does_not_import_torch() -> None:
    code = "import sys, router.main, pd_serve.protocol.client; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_long_text_does_not_hold_up_the_event_loop(tmp_path: Path) -> None:
    """Another task has many turns meanwhile: tokenized without the interpreter's lock."""
    codec = FolderTokenizer(write_tokenizer(tmp_path))
    text = "".join(random.Random(4).choices("abcdefgh ", k=200 * LONG_TEXT))
    num_turns = 0

    async def beat() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0.001)
            num_turns += 1

    beating = asyncio.create_task(beat())
    await asyncio.sleep(0.01)
    before = num_turns
    (token_ids,) = await tokenize(codec, Texts((text,), add_special_tokens=True))
    assert len(token_ids) == len(text)
    assert num_turns - before > 5
    beating.cancel()


def test_no_token_stands_for_more_characters_than_is_said(tmp_path: Path) -> None:
    codec = FolderTokenizer(write_tokenizer(tmp_path))
    assert codec.max_token_chars == len("<|im_start|>")
    for text in ("<|im_start|>" * 9, " token" * 9, "né€" * 9):
        assert len(codec.encode(text, False)) * codec.max_token_chars >= len(text)
