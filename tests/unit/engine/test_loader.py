from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pd_serve.config import Config, KVConfig, ModelConfig
from pd_serve.engine import loader
from pd_serve.errors import ConfigError
from tests.unit.engine.model_folders import write_config


def _config(kv_dtype: str) -> Config:
    return Config(
        model=ModelConfig.model_validate({"dtype": "bfloat16", "load_format": "random"}),
        kv=KVConfig.model_validate({"dtype": kv_dtype, "num_blocks": 4}),
    )


def test_fp8_kv_halves_the_pool(tmp_path: Path) -> None:
    folder = write_config(tmp_path)
    plain, small = (loader.plan_engine(folder, _config(dtype)).layout for dtype in ("auto", "fp8_e4m3"))
    # 8 elements of 2 bytes become 8 of 1 and a scale.
    assert (plain.pool_nbytes, small.pool_nbytes) == (4 * 2 * 2 * 16 * 2 * 16, 4 * 2 * 2 * 16 * 2 * 9)


def test_fp8_kv_is_refused_where_attention_reads_the_pool_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "choose_device", lambda name: torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"kv\.dtype fp8_e4m3 is not supported on cuda") as caught:
        loader.plan_engine(write_config(tmp_path), _config("fp8_e4m3"))
    assert "\n" not in str(caught.value)
    assert loader.plan_engine(write_config(tmp_path), _config("auto")).layout.num_blocks == 4
