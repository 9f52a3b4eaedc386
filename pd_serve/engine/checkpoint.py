"""The safetensors files of a model folder: which tensor lies where, whether the files are whole, and what tells two models apart.

Format: https://github.com/huggingface/safetensors#format. Reads headers only; no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from pd_serve.engine.config_json import ConfigJson, read_json
from pd_serve.errors import ModelError

_INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
_MAX_HEADER_NBYTES = 100 * 1024 * 1024
_SAMPLES_PER_FILE = 64
_SAMPLE_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class TensorEntry:
    file: Path
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a folder by name. Every file named was present and of the length that its header promises when opened."""

    path: Path
    tensors: dict[str, TensorEntry]
    files: tuple[Path, ...]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Raises ModelError naming the first file that is missing, truncated or no safetensors file."""
        files = _shard_files(path)
        tensors: dict[str, TensorEntry] = {}
        for file in files:
            for name, shape in _read_shapes(file).items():
                tensors[name] = TensorEntry(file, shape)
        return cls(path, tensors, files)

    def fingerprint(self) -> str:
        """Cheap digest of the content: config, then of each file its size, its header and 64 samples of 4 KiB spread over it.

        Not of every byte: two checkpoints that differ only between the samples look equal. Fine-tuning changes nearly all bytes.
        """
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        for file in self.files:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with file.open("rb") as stream:
                header_nbytes = int.from_bytes(stream.read(8), "little")
                digest.update(stream.read(header_nbytes))
                data_start = 8 + header_nbytes
                for sample in range(_SAMPLES_PER_FILE):
                    stream.seek(data_start + (size - data_start) * sample // _SAMPLES_PER_FILE)
                    digest.update(stream.read(_SAMPLE_NBYTES))
        return digest.hexdigest()[:32]


def _shard_files(path: Path) -> tuple[Path, ...]:
    index = path / _INDEX_NAME
    if index.is_file():
        names = sorted({str(name) for name in read_json(index).section("weight_map").values.values()})
        if not names:
            raise ModelError(f"{index} names no files")
    elif (path / _SINGLE_NAME).is_file():
        names = [_SINGLE_NAME]
    else:
        raise ModelError(f"{path} holds no safetensors ({_SINGLE_NAME} or {_INDEX_NAME}); other formats are not read")
    for name in names:
        # A name from the index must not lead out of the folder.
        if os.path.basename(name) != name:
            raise ModelError(f"{index}: {name!r} is not a plain file name")
        if not (path / name).is_file():
            raise ModelError(f"{path} is incomplete: shard {name} is missing")
    return tuple(path / name for name in names)


def _read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_nbytes = int.from_bytes(stream.read(8), "little")
        if size < 8 or header_nbytes > min(size - 8, _MAX_HEADER_NBYTES):
            raise ModelError(f"{file} is not a safetensors file, or it is truncated ({size} bytes)")
        raw = stream.read(header_nbytes)
    try:
        values = json.loads(raw)
    except ValueError as error:
        raise ModelError(f"{file} has a damaged header") from error
    if not isinstance(values, dict):
        raise ModelError(f"{file} has a damaged header")
    header = ConfigJson(file, {key: value for key, value in values.items() if key != "__metadata__"})
    shapes: dict[str, tuple[int, ...]] = {}
    data_end = 0
    for name in header.values:
        entry = header.section(name)
        shapes[name] = entry.integers("shape")
        data_end = max(data_end, *entry.integers("data_offsets"))
    expected = 8 + header_nbytes + data_end
    if size != expected:
        raise ModelError(f"{file} is truncated or damaged: {size} bytes instead of {expected}")
    return shapes
