"""What the supervisor of a router of several processes tells each of them: one JSON file, whose path is the only argument.

The supervisor owns the files (in a folder that only this user may enter), the block of memory and the socket pairs, which are inherited.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from pd_serve.config import Config
from pd_serve.errors import ConfigError


class ProcessSpec(BaseModel):
    """Resolved: no further source of settings is read. `config.router.port` and `config.model.id` are the real ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: Config
    index: int
    num_processes: int
    block_fd: int
    """Of the shared Occupancy."""
    sibling_fd: int
    """Socket to the supervisor."""

    def write(self, path: Path) -> None:
        """Readable by this user only: the cluster secret is inside."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(self.model_dump_json())

    @staticmethod
    def read(path: Path) -> ProcessSpec:
        """Raises ConfigError."""
        try:
            return ProcessSpec.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise ConfigError(f"cannot read the settings of a router process from {path}: {error}") from error
