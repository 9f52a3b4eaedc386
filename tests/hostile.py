"""What a hostile or broken process may put on the wire: bytes, and valid frames with some of their parts replaced."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from hypothesis import strategies as st

Path = tuple[int | str, ...]
HOSTILE_VALUES: tuple[object, ...] = (
    -1, 0, 1, 2**31 - 1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1,
    0.0, -1.0, 1e308, float("nan"), float("inf"), float("-inf"),
    None, True, "", "x" * 300, "\x00", b"", b"\xff" * 64, [], {}, [[[]]], [-1], [2**31, 2**31], list(range(40)),
)  # fmt: skip


def mutated(payloads: list[bytes]) -> st.SearchStrategy[bytes]:
    """Encodings that were valid until something was done to them; a few still are, with values that nobody sensible sends."""
    return st.one_of(
        st.binary(max_size=200),
        st.sampled_from(payloads).flatmap(_damaged_bytes),
        st.sampled_from(payloads).flatmap(_replaced_parts),
    )


def each_replaced(payload: bytes) -> Iterator[bytes]:
    """Every part replaced by every hostile value, one at a time."""
    tree = msgspec.msgpack.decode(payload)
    for path in _paths(tree):
        for value in HOSTILE_VALUES:
            yield msgspec.msgpack.encode(_set(tree, path, value))


def _damaged_bytes(payload: bytes) -> st.SearchStrategy[bytes]:
    positions = st.integers(0, len(payload) - 1)
    flips = st.tuples(positions, st.integers(1, 255)).map(lambda flip: _flipped(payload, *flip))
    return st.one_of(flips, positions.map(lambda end: payload[:end]), st.binary(min_size=1, max_size=20).map(lambda tail: payload + tail))


def _flipped(payload: bytes, position: int, mask: int) -> bytes:
    return payload[:position] + bytes([payload[position] ^ mask]) + payload[position + 1 :]


def _replaced_parts(payload: bytes) -> st.SearchStrategy[bytes]:
    tree = msgspec.msgpack.decode(payload)
    changes = st.lists(st.tuples(st.sampled_from(_paths(tree)), st.sampled_from(HOSTILE_VALUES)), min_size=1, max_size=2)
    return changes.map(lambda made: msgspec.msgpack.encode(_with(tree, made)))


def _paths(tree: object, at: Path = ()) -> list[Path]:
    """Of every part below the root; tags too."""
    items = enumerate(tree) if isinstance(tree, list) else tree.items() if isinstance(tree, dict) else ()
    paths: list[Path] = []
    for key, part in items:
        paths += [(*at, key), *_paths(part, (*at, key))]
    return paths


def _with(tree: object, changes: list[tuple[Path, object]]) -> object:
    for path, value in changes:
        tree = _set(tree, path, value)
    return tree


def _set(tree: object, path: Path, value: object) -> object:
    """A copy with that part replaced; the same where an earlier change has taken the part away."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(tree, list) and isinstance(key, int) and key < len(tree):
        return [*tree[:key], _set(tree[key], rest, value), *tree[key + 1 :]]
    if isinstance(tree, dict) and key in tree:
        return {**tree, key: _set(tree[key], rest, value)}
    return tree
