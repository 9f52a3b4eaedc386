from __future__ import annotations

import pytest
import torch

from pd_serve.engine.kv_cache import PagedCache, open_kv_cache
from pd_serve.errors import ConfigError
from pd_serve.kv.layout import KVDtype, KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=3, num_blocks=5, dtype=KVDtype.BFLOAT16)
CPU = torch.device("cpu")


def open_cache(buffer: memoryview | None, device: torch.device) -> PagedCache:
    return open_kv_cache(LAYOUT, buffer, device, torch.bfloat16)


def test_writes_land_where_the_layout_says() -> None:
    memory = bytearray(LAYOUT.pool_nbytes)
    cache = open_cache(memoryview(memory), CPU)
    block, offset = 4, 2
    kv_heads = torch.arange(16, dtype=torch.bfloat16).view(1, 4, 4)
    cache.write(1, cache.rows(torch.tensor([block * 3 + offset])), kv_heads)
    key_at = LAYOUT.block_offset(1, block) + offset * LAYOUT.token_nbytes
    value_at = key_at + LAYOUT.plane_nbytes
    assert memory[key_at : key_at + LAYOUT.token_nbytes] == kv_heads[0, :2].contiguous().view(torch.uint8).numpy().tobytes()
    assert memory[value_at : value_at + LAYOUT.token_nbytes] == kv_heads[0, 2:].contiguous().view(torch.uint8).numpy().tobytes()
    assert sum(byte != 0 for byte in memory) == sum(byte != 0 for byte in kv_heads.view(torch.uint8).flatten().tolist())
    assert torch.equal(cache.layer(1).slab[block, 0, offset], kv_heads[0, :2])


def test_bytes_that_another_process_writes_are_seen() -> None:
    memory = bytearray(LAYOUT.pool_nbytes)
    cache = open_cache(memoryview(memory), CPU)
    memory[:2] = torch.tensor([1.5], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert float(cache.layer(0).slab[0, 0, 0, 0, 0]) == 1.5


def test_own_memory_starts_as_zeros_and_has_an_address() -> None:
    cache = open_cache(None, CPU)
    assert cache.layer(1).slab.eq(0).all()
    assert cache.address == cache.layer(0).slab.data_ptr()


def test_a_buffer_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="writable bytes"):
        open_cache(memoryview(bytearray(LAYOUT.pool_nbytes - 1)), CPU)
    with pytest.raises(ConfigError, match="writable bytes"):
        open_cache(memoryview(bytes(LAYOUT.pool_nbytes)), CPU)
    with pytest.raises(ConfigError, match="host buffer"):
        open_cache(memoryview(bytearray(LAYOUT.pool_nbytes)), torch.device("cuda"))
