from __future__ import annotations

from pathlib import Path

import pytest

from pd_serve.config import Config, ModelConfig
from pd_serve.errors import ModelError
from pd_serve.protocol.openai import Message
from router.detokenizer import new_detokenizer
from router.main import create_app, new_codec
from router.stand_in_tokenizer import StandInTokenizer
from router.tokenizer import FolderTokenizer
from tests.fakes import write_tokenizer


def config_only(tmp_path: Path, content: str = '{"vocab_size": 1000, "max_position_embeddings": 64}') -> Path:
    (tmp_path / "config.json").write_text(content)
    return tmp_path


def test_text_is_its_bytes_and_higher_tokens_are_their_numbers() -> None:
    codec = StandInTokenizer(1000)
    assert codec.encode("né", add_special_tokens=True) == (ord("n"), 0xC3, 0xA9)
    detokenizer = new_detokenizer(codec)
    assert "".join(map(detokenizer.push, (ord("n"), 0xC3, 0xA9, 999))) + detokenizer.flush() == "né<999>"
    assert codec.decode((ord("n"), 0xC3, 0xA9, 999)) == "né<999>"
    assert codec.render_chat((Message(role="user", content="hi"),), {}) == "user: hi\n"


def test_no_token_lies_outside_a_small_vocabulary() -> None:
    assert max(StandInTokenizer(100).encode("xyz\u20ac", add_special_tokens=True)) < 100


def test_random_weights_need_no_tokenizer_and_use_the_one_that_is_there(tmp_path: Path) -> None:
    config = Config(model=ModelConfig(id=str(config_only(tmp_path)), load_format="random"))
    assert new_codec(config, tmp_path).vocab_size == 1000
    create_app(config)
    write_tokenizer(tmp_path)
    assert isinstance(new_codec(config, tmp_path), FolderTokenizer)


def test_real_weights_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    config = Config(model=ModelConfig(id=str(config_only(tmp_path))))
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        new_codec(config, tmp_path)


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"vocab_size": 0}'])
def test_a_config_without_a_vocabulary_is_a_model_error(tmp_path: Path, content: str) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        StandInTokenizer.of_folder(config_only(tmp_path, content))
