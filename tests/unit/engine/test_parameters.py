from __future__ import annotations

import math
from pathlib import Path

import pytest

from pd_serve.engine.families.registry import describe
from pd_serve.engine.parameters import num_parameters
from tests.unit.engine.model_folders import write_config
from tests.unit.engine.random_models import MODELS, tensor_shapes


@pytest.mark.parametrize("name", MODELS)
def test_what_is_counted_is_what_the_engine_reads_of_matrices(name: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path, **MODELS[name])
    info = describe(folder, has_weights=False)
    matrices = {key: math.prod(shape) for key, shape in tensor_shapes(folder).items() if len(shape) > 1}
    assert num_parameters(info) == sum(matrices.values())
    embeddings = sum(size for key, size in matrices.items() if "embed_tokens" in key or "lm_head" in key)
    assert num_parameters(info, 2) == embeddings + (num_parameters(info) - embeddings) // 2
