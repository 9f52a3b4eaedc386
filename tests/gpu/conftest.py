"""Everything here needs a CUDA device: `pytest -m gpu tests/gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pd_serve.model_store import resolve_model


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return resolve_model("demo")
