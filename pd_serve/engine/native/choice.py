"""Whether the compiled operators are used: engine.cpu_ops.

    off    never
    auto   where they fit the model and there is a compiler, or a build of it in the cache; else torch's, which is told in the log
    on     as auto, but an error where they cannot be used

Called by the loader on the engine thread.
"""

from __future__ import annotations

import logging

import torch

from pd_serve.engine.native.build import build_library, find_compiler
from pd_serve.engine.native.operators import DTYPES, LANES, Operators
from pd_serve.errors import ConfigError, ModelError
from pd_serve.kv.layout import KVLayout

_log = logging.getLogger(__name__)

_MAX_HEAD_DIM = 256


def open_operators(choice: str, layout: KVLayout, dtype: torch.dtype, device: torch.device, cache_dir: str) -> Operators | None:
    """Compiled first where the cache has none. Raises ConfigError where `choice` is `on` and they cannot be used."""
    if choice == "off" or device.type != "cpu":
        return None
    try:
        return _open(layout, dtype, cache_dir)
    except (ConfigError, ModelError, OSError) as error:
        if choice == "on":
            raise ConfigError(f"engine.cpu_ops is on, but {error}") from error
        _log.info("decode by torch's operators alone: %s", error)
        return None


def _open(layout: KVLayout, dtype: torch.dtype, cache_dir: str) -> Operators:
    """Raises ConfigError, ModelError, OSError."""
    if dtype not in DTYPES or layout.dtype.has_scales:
        raise ConfigError("compiled operators are for bfloat16 and float32, with KV of the same type")
    if layout.num_planes != 2 or layout.head_dim % LANES or layout.head_dim > _MAX_HEAD_DIM:
        raise ConfigError(f"compiled operators are for heads of a multiple of {LANES} elements, {_MAX_HEAD_DIM} at most")
    compiler = find_compiler()
    if compiler is None:
        raise ConfigError("there is no C++ compiler (c++, g++, clang++, or $CXX)")
    return Operators(build_library(compiler, layout.head_dim, cache_dir, _log_progress), layout.head_dim, dtype)


def _log_progress(what: str, done: int, total: int) -> None:
    _log.info("%s", what)
