"""Which CUDA devices there are, without loading CUDA: the launcher and doctor must stay light and must not hold a device."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

_QUERY = ("nvidia-smi", "--query-gpu=index,name,memory.total,memory.free,driver_version", "--format=csv,noheader,nounits")
_TIMEOUT_S = 10.0


def query_gpus() -> tuple[tuple[str, ...], ...]:
    """Per device: index, name, total and free memory in MiB, driver version. Empty without a driver."""
    try:
        reply = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = (tuple(part.strip() for part in line.split(",")) for line in reply.stdout.splitlines())
    return tuple(row for row in rows if len(row) == 5)


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names for CUDA_VISIBLE_DEVICES: what the user has restricted it to, else every device."""
    restricted = environ.get("CUDA_VISIBLE_DEVICES")
    if restricted is not None:
        return tuple(name.strip() for name in restricted.split(",") if name.strip() and name.strip() != "-1")
    return tuple(row[0] for row in query_gpus())
