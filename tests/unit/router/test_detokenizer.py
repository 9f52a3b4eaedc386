from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from router.detokenizer import MAX_HELD_TOKENS, ByteDetokenizer, StopFinder, WindowDetokenizer, new_detokenizer
from router.tokenizer import FolderTokenizer
from tests.fakes import byte_ids, write_tokenizer

TEXTS = ("plain", "né ñ", "世界 你好，世", "👩‍👩‍👧 and 🏳️‍🌈", "한국어 العربية", "a\u2028b\x00c")


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> FolderTokenizer:
    return FolderTokenizer(write_tokenizer(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("kind", [ByteDetokenizer, WindowDetokenizer])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_make_the_text_and_never_split_a_character(codec: FolderTokenizer, kind: type, text: str) -> None:
    detokenizer = kind(codec)
    pieces = [detokenizer.push(token_id) for token_id in byte_ids(text)]
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 259), max_size=40))
def test_any_tokens_give_what_decoding_at_once_gives(codec: FolderTokenizer, ids: list[int]) -> None:
    detokenizer = ByteDetokenizer(codec)
    text = "".join([*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()])
    assert text == codec.decode(tuple(ids))


def test_unfinished_character_is_shown_at_the_end(codec: FolderTokenizer) -> None:
    for kind in (ByteDetokenizer, WindowDetokenizer):
        detokenizer = kind(codec)
        assert "".join(detokenizer.push(token_id) for token_id in byte_ids("a世")[:-1]) == "a"
        assert detokenizer.flush() == "\ufffd"


def test_hold_back_is_bounded_on_invalid_bytes(codec: FolderTokenizer) -> None:
    detokenizer = WindowDetokenizer(codec)
    pieces = [detokenizer.push(4 + 0xFF) for _ in range(3 * MAX_HELD_TOKENS)]
    assert len("".join(pieces)) >= 2 * MAX_HELD_TOKENS
    lean = ByteDetokenizer(codec)
    assert lean.push(4 + 0xFF) == "\ufffd"


def test_special_tokens_are_no_text(codec: FolderTokenizer) -> None:
    assert codec.text_bytes(0) == b""
    assert codec.token_bytes(0) == b"<|im_end|>"
    assert codec.text_bytes(3) == b" token"


def test_tokens_beyond_the_tokenizer_are_no_text(codec: FolderTokenizer) -> None:
    detokenizer = new_detokenizer(codec)
    assert detokenizer.push(100_000) == ""


def test_sentencepiece_vocabularies_keep_their_spaces(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "\u2581Hello": 1, "\u2581world": 2, "<0xE4>": 3, "<0xB8>": 4, "<0x96>": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = FolderTokenizer(tmp_path)
    detokenizer = new_detokenizer(codec)
    assert isinstance(detokenizer, WindowDetokenizer)
    pieces = [detokenizer.push(token_id) for token_id in (1, 2, 3, 4, 5, 2)]
    assert pieces == ["Hello", " world", "", "", "世", " world"]
    assert codec.token_bytes(3) == b"\xe4"


@settings(deadline=None)
@given(
    text=st.text("ab.", max_size=60),
    stops=st.lists(st.text("ab.", min_size=1, max_size=6), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 60), max_size=10),
)
def test_text_is_cut_at_the_first_stop_however_it_arrives(text: str, stops: list[str], cuts: list[int]) -> None:
    finder = StopFinder(tuple(stops))
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown = ""
    for begin, end in pairwise(edges):
        piece = finder.push(text[begin:end])
        shown += piece
    if finder.is_found:
        assert finder.flush() == ""
        assert any(text.startswith(shown + stop) for stop in stops)
        assert not any(stop in shown for stop in stops)
    else:
        assert shown + finder.flush() == text
        assert not any(stop in text for stop in stops)


def test_only_a_possible_beginning_is_held_back() -> None:
    finder = StopFinder(("###",))
    assert finder.push("abc#") == "abc"
    assert finder.push("d##") == "#d"
    assert finder.push("x") == "##x"
