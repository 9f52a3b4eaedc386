"""Which workers fit each other, what is said where they do not, and what is converted where they do."""

from __future__ import annotations

import msgspec
import pytest

from pd_serve.kv.layout import KVDtype, KVOrder
from pd_serve.protocol.exchange import conversion, differences
from pd_serve.protocol.identity import ModelIdentity
from pd_serve.protocol.link import PeerInfo
from tests.fakes import kv_layout, peer_id, peer_info

IDENTITY = ModelIdentity("tiny", 260, "abc", "default theta=10000")
LAYOUT = msgspec.structs.replace(kv_layout(), num_kv_heads=4)
ONE = msgspec.structs.replace(peer_info(layout=LAYOUT), model=IDENTITY, total_kv_heads=4)


def changed(**fields: object) -> PeerInfo:
    return msgspec.structs.replace(ONE, peer=peer_id("other"), **fields)


def shared_out(num_ranks: int, num_heads: int) -> PeerInfo:
    """A worker of several ranks that hold so many heads each."""
    return changed(layout=msgspec.structs.replace(LAYOUT, num_kv_heads=num_heads), transport_metadata=(b"",) * num_ranks)


def identity(**fields: object) -> PeerInfo:
    return changed(model=msgspec.structs.replace(IDENTITY, **fields))


@pytest.mark.parametrize(
    ("what", "other", "values"),
    [
        ("protocol version", changed(protocol_version=99), (str(ONE.protocol_version), "99")),
        ("transport", changed(transport="ucx"), ("loopback", "ucx")),
        ("rope", identity(rope="default theta=500000"), ("theta=10000", "theta=500000")),
        ("vocabulary", identity(vocab_size=261), ("260 tokens", "261 tokens")),
        ("vocabulary", identity(tokenizer="def"), ("abc", "def")),
        ("model fingerprint", changed(model_fingerprint="model-b"), ("model-a (tiny)", "model-b (tiny)")),
        ("KV layout", changed(layout=msgspec.structs.replace(LAYOUT, num_layers=3)), ("2 layers", "3 layers")),
        ("KV layout", changed(layout=msgspec.structs.replace(ONE.layout, num_planes=1)), ("keys and values", "latents")),
        ("number of KV heads", changed(total_kv_heads=8, layout=msgspec.structs.replace(LAYOUT, num_kv_heads=8)), ("4", "8")),
        ("ranks that share 4 KV heads", shared_out(3, 1), ("1 with 4 each", "3 with 1 each")),
        ("ranks that share 4 KV heads", shared_out(2, 4), ("1 with 4 each", "2 with 4 each")),
        ("ranks that share 4 KV heads", shared_out(0, 4), ("1 with 4 each", "0 with 4 each")),
    ],
)
def test_each_part_is_named_alone_and_with_both_values(what: str, other: PeerInfo, values: tuple[str, str]) -> None:
    (found,) = differences(ONE, other)
    assert found.what == what
    assert values[0] in str(found.one)
    assert values[1] in str(found.other)
    (reverse,) = differences(other, ONE)
    assert (reverse.what, reverse.one, reverse.other) == (what, found.other, found.one)


def test_all_that_differs_is_told_at_once() -> None:
    other = msgspec.structs.replace(identity(rope="other"), protocol_version=99, model_fingerprint="model-b")
    assert [found.what for found in differences(ONE, other)] == ["protocol version", "rope", "model fingerprint"]


@pytest.mark.parametrize(
    "other",
    [
        changed(),
        identity(name="another-name"),
        identity(tokenizer=""),
        changed(layout=msgspec.structs.replace(LAYOUT, num_blocks=7)),
        shared_out(2, 2),
        shared_out(8, 1),
    ],
    ids=["equal", "name", "no tokenizer", "pool", "two ranks", "more ranks than heads"],
)
def test_what_does_not_matter_is_no_difference(other: PeerInfo) -> None:
    assert differences(ONE, other) == ()


def test_a_conversion_names_what_it_changes_and_the_way() -> None:
    layout = msgspec.structs.replace(ONE.layout, block_size=64, dtype=KVDtype.FP8_E4M3, order=KVOrder.HEAD_MAJOR)
    before = msgspec.structs.replace(ONE.layout, block_size=16, dtype=KVDtype.BFLOAT16)
    src, dst = changed(layout=before), changed(layout=msgspec.structs.replace(layout, num_kv_heads=2), transport_metadata=(b"", b""))
    assert differences(src, dst) == ()
    assert conversion(src, dst) == "block 16->64, bf16->fp8, order token->head, ranks 1->2"
    assert conversion(dst, src) == "block 64->16, fp8->bf16, order head->token, ranks 2->1"
    assert conversion(src, src) == "none"
