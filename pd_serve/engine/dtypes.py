"""Names of number types in configs and layouts, and torch's."""

from __future__ import annotations

import torch

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """`name` as in ModelConfig.dtype and KVDtype."""
    return _TORCH_DTYPES[name]
