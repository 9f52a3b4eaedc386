"""Which processes can share memory with this one and see its process id."""

from __future__ import annotations

import os
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """Equal for two processes of one boot of one machine in the same IPC and process-id namespaces (so not for two containers)."""
    namespaces = (os.readlink(f"/proc/self/ns/{name}") for name in ("ipc", "pid"))
    return " ".join((_BOOT_ID.read_text().strip(), *namespaces))
