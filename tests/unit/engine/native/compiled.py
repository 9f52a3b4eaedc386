"""The compiled operators for tests: built once into the user's cache, in about two seconds; a skip where there is no compiler."""

from __future__ import annotations

import pytest
import torch

from pd_serve.engine.native.build import build_library, find_compiler
from pd_serve.engine.native.operators import Operators
from pd_serve.model_store.progress import ignore_progress


def operators(head_dim: int, dtype: torch.dtype) -> Operators:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    return Operators(build_library(compiler, head_dim, "", ignore_progress), head_dim, dtype)
