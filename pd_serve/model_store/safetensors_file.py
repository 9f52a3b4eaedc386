"""Writing a safetensors file one tensor at a time, so that a conversion never holds the whole model.

Format: https://github.com/huggingface/safetensors#format  (8-byte little-endian header length, JSON header, data without holes).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 8


def write_bfloat16(path: Path, shapes: Sequence[tuple[str, tuple[int, ...]]], tensors: Iterable[NDArray[np.float32]]) -> None:
    """Write `tensors` (float32, in the order of `shapes`) as bfloat16.

    Raises ValueError when a tensor has another shape than announced; OSError when the disk refuses.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes:
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for (name, shape), tensor in zip(shapes, tensors, strict=True):
            if tensor.shape != shape:
                raise ValueError(f"tensor {name} has shape {tensor.shape}, announced as {shape}")
            file.write(round_to_bfloat16(tensor).data)


def round_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round finite float32 to the nearest bfloat16, ties to even (what torch does); same shape, the bits as uint16."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")
