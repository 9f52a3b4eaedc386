"""Copies of many ranges: the same bytes as memmove, whichever way; built once, and done without where that fails."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pd_serve.errors import TransportUnavailableError
from pd_serve.transport.native import build, ranges
from pd_serve.transport.native.build import build_library, find_compiler
from pd_serve.transport.native.ranges import LOCKED_NBYTES, CompiledRangeCopy, PlainRangeCopy, RangeCopy, range_copy

NBYTES = 4 << 20
LENGTHS = (0, 1, 63, 64, 511, 512, 513, 4095, 4096, 4097, 12288, 4 * 4096, 65536 + 100, LOCKED_NBYTES)


@pytest.fixture(params=["compiled", "plain"])
def copy(request: pytest.FixtureRequest) -> RangeCopy:
    if request.param == "plain":
        return PlainRangeCopy()
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    return CompiledRangeCopy(build_library(compiler))


@pytest.mark.parametrize("seed", range(8))
def test_ranges_land_where_they_belong_and_nowhere_else(copy: RangeCopy, seed: int) -> None:
    random = np.random.default_rng(seed)
    source, target = random.integers(1, 256, NBYTES, np.uint8), np.zeros(NBYTES, np.uint8)
    lengths = random.permutation([*LENGTHS, *random.integers(0, 30_000, 20)])
    gaps = random.integers(0, 200, len(lengths)) if seed else np.zeros(len(lengths), np.int64)
    targets = np.cumsum(lengths + gaps) - lengths
    ops = np.stack((random.integers(0, NBYTES - lengths.max(), len(lengths)), targets, lengths), axis=1)
    wanted = target.copy()
    for start, to, nbytes in ops.tolist():
        wanted[to : to + nbytes] = source[start : start + nbytes]
    copy(target.ctypes.data, source.ctypes.data, ops[random.permutation(len(ops))])
    assert np.array_equal(target, wanted)


def test_nothing_to_copy_is_fine(copy: RangeCopy) -> None:
    copy(0, 0, np.empty((0, 3), np.int64))


def test_without_a_compiler_the_c_library_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "find_compiler", lambda: None)
    assert isinstance(range_copy.__wrapped__(), PlainRangeCopy)


def test_what_does_not_compile_is_told_and_the_c_library_copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    broken = tmp_path / "ranges.c"
    broken.write_text("int pd_copy_ranges(")
    monkeypatch.setattr(build, "SOURCE", broken)
    with pytest.raises(TransportUnavailableError, match=r"ranges\.c"):
        build_library(compiler, str(tmp_path))
    assert not list((tmp_path / "copies").glob("[!.]*"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert isinstance(range_copy.__wrapped__(), PlainRangeCopy)
