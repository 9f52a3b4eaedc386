"""Compiles ranges.c with the system's C compiler, once per machine, compiler and source, into the user's cache folder.

Called on the transport thread before the first peer joins. About a third of a second, the first time.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
from functools import partial
from pathlib import Path

from pd_serve.errors import TransportUnavailableError
from pd_serve.model_store.cache import cache_root, prepare_once
from pd_serve.model_store.progress import ignore_progress
from pd_serve.native_build import processor, run_compiler

SOURCE = Path(__file__).with_name("ranges.c")
LIBRARY = "ranges.so"
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=c11", "-O3", "-march=native", "-shared", "-fPIC")
_TIME_LIMIT_S = 30.0


def find_compiler() -> Path | None:
    """What the first of the usual names stands for; None where there is none."""
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    return Path(found).resolve() if found is not None else None


def build_library(compiler: Path, cache_dir: str = "") -> Path:
    """The shared object; compiled now where the cache has none that fits this processor.

    Raises TransportUnavailableError with the compiler's words where it fails, ModelError where the cache cannot be written, OSError.
    """
    folder = cache_root(cache_dir) / "copies" / _key(compiler)
    return prepare_once(folder, partial(_compile, compiler), ignore_progress) / LIBRARY


def _compile(compiler: Path, folder: Path) -> None:
    command = [str(compiler), *_FLAGS, str(SOURCE), "-o", str(folder / LIBRARY)]
    run_compiler(command, SOURCE.name, _TIME_LIMIT_S, TransportUnavailableError)


def _key(compiler: Path) -> str:
    """Of everything that the machine code depends on: a home folder may be shared by unlike machines."""
    state = compiler.stat()
    identity = (str(compiler), str(state.st_size), str(state.st_mtime_ns))
    parts = (SOURCE.read_text(encoding="utf-8"), *_FLAGS, *identity, platform.machine(), processor())
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()
