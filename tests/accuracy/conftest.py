"""The demo model, converted once per user, and one compute thread: bit equality is promised for equal thread counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pd_serve.errors import ModelError
from pd_serve.model_store import resolve_model


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    try:
        return resolve_model("demo")
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
