"""What a front tells a rank process it starts: one JSON file, whose path is the only argument of `python -m workers.rank`.

The front owns the files and the Unix socket (all in a folder that only this user may enter) and removes them when it ends. Rank 0 connects
to `socket_path`, sends RankReady once the worker can serve, and exits when the socket closes: a rank without its front serves nobody. The
other ranks speak to rank 0 only, over socket pairs that they inherit.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from pd_serve.config import Config
from pd_serve.errors import ConfigError
from pd_serve.ids import Incarnation, PeerId, WorkerId
from pd_serve.protocol.link import Role


class RankSpec(BaseModel):
    """Resolved: no further source of settings is read by the rank. `config.worker.port` and `.advertise` are the real ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    worker_id: str
    incarnation: int
    role: Role
    socket_path: str
    """Unix socket the front listens on; 4-byte little-endian length, then one FrontFrame or RankFrame."""
    config: Config
    rank: int = 0
    group_fds: tuple[int, ...] = ()
    """Inherited sockets: on rank 0 to the ranks 1, 2, ... in order; on another rank the one to rank 0."""
    rendezvous: str = ""
    """Where the engines of several ranks meet (engine/parallel.py)."""

    @property
    def peer(self) -> PeerId:
        """The worker."""
        return PeerId(WorkerId(self.worker_id), Incarnation(self.incarnation))

    def write(self, path: Path) -> None:
        """Readable by this user only: the cluster secret is inside."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(self.model_dump_json())

    @staticmethod
    def read(path: Path) -> RankSpec:
        """Raises ConfigError."""
        try:
            return RankSpec.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise ConfigError(f"cannot read the rank's settings from {path}: {error}") from error
