"""Compiles the operators with the system's C++ compiler, once per machine, compiler, source and head size, into the user's cache folder.

Called by the loader on the engine thread, before any request is served. About two seconds; whoever waits for it is told.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pd_serve.errors import ConfigError
from pd_serve.model_store.cache import cache_root, prepare_once
from pd_serve.model_store.progress import Progress
from pd_serve.native_build import processor, run_compiler

_NAMES = ("attention.cpp", "decode.cpp", "glue.cpp", "linear.cpp", "read.cpp", "geometry.h", "operators.h", "vectors.h")
SOURCES = tuple(Path(__file__).with_name(name) for name in _NAMES)
LIBRARY = "operators.so"
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
"""No -ffast-math: a NaN must come through, and sums keep the order they are written in. OpenMP's runtime is the one torch has loaded."""
_TIME_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Compiler:
    path: str
    version: str


def find_compiler() -> Compiler | None:
    """$CXX, else the first of the usual names; None where there is none that answers."""
    for name in (os.environ.get("CXX", ""), *_COMPILERS):
        path = shutil.which(name) if name else None
        if path is not None:
            asked = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            if asked.returncode == 0:
                return Compiler(path, asked.stdout.partition("\n")[0])
    return None


def build_library(compiler: Compiler, head_dim: int, cache_dir: str, progress: Progress) -> Path:
    """The shared object; compiled now where the cache has none that fits this processor.

    `cache_dir` as in the config. Raises ConfigError with the compiler's words where it fails, ModelError where the cache cannot be written.
    """
    folder = cache_root(cache_dir) / "operators" / _key(compiler, head_dim)
    if not folder.is_dir():
        progress("compiling operators for this processor, once: a few seconds", 0, 0)
    return prepare_once(folder, partial(_compile, compiler, head_dim), progress) / LIBRARY


def _compile(compiler: Compiler, head_dim: int, folder: Path) -> None:
    command = [
        compiler.path,
        *_FLAGS,
        f"-DHEAD_DIM={head_dim}",
        *(str(path) for path in SOURCES if path.suffix == ".cpp"),
        "-o",
        str(folder / LIBRARY),
    ]
    run_compiler(command, "the operators", _TIME_LIMIT_S, ConfigError)


def _key(compiler: Compiler, head_dim: int) -> str:
    """Of everything that the machine code depends on: a home folder may be shared by unlike machines."""
    sources = (path.read_text(encoding="utf-8") for path in SOURCES)
    parts = (*sources, *_FLAGS, compiler.path, compiler.version, str(head_dim), platform.machine(), processor())
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()
