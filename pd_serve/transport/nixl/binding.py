"""The calls of seam.py over NIXL: the one file that imports it. An agent per lane stands for a UCX context with its worker.

    messages    notifications, in one frame: [channel u8][header length u16][stream u32][header][payload]
    puts        NIXL WRITE transfers, straight into the peer's memory
    failure     what NIXL raises, at the latest with the next sign of life (one per second and peer)

What NIXL lacks, and what stands in for it. It has no descriptor to sleep on: every message is followed by an empty datagram to the
receiver's *doorbell* (a UDP socket), and worker threads look every IDLE_LOOK_S even if none came. It does not say when a message was taken:
a request of Channel.DATA is done when the receiver has counted it (`_Credit`), which bounds what a peer that stands still costs.

NIXL's own progress thread polls a whole core by default. Its delay is set here: then it sleeps on UCX's descriptor, wakes with what
arrives, and for nothing else more often than that.

Which of UCX's transports an agent uses can be told only as one name or all. Of all, an endpoint that reports failures takes those that can:
so never the queue of messages in shared memory (ports.py says why), but process_vm_writev (`cma`) for puts and tcp for the wire-up.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import struct
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pd_serve.errors import TransportError, TransportUnavailableError
from pd_serve.transport.nixl.agent import NixlWorker
from pd_serve.transport.ucx.lanes import rdma_devices

PROGRESS_THREAD_DELAY_US = 100_000
"""How often NIXL's thread looks when nothing arrives; what arrives wakes it."""
_MODULES = (("nixl_cu12", "nixl-cu12"), ("nixl_cu13", "nixl-cu13"))
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


class NixlBinding:
    """Raises TransportUnavailableError when NIXL cannot be imported."""

    name = "nixl"
    messaging = "nixl"

    def __init__(self, host: str) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # what it would print is raised as well
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        self.host = host
        self.api, self.version = _import()
        self.location = str(self.api.__file__)
        self.errors: tuple[type[Exception], ...] = tuple(
            item for item in vars(self.api).values() if isinstance(item, type) and issubclass(item, Exception)
        )

    def open_context(self, options: Mapping[str, str], one_sided: bool) -> NixlContext:
        return NixlContext(self, options)


class NixlContext:
    """One agent with its UCX backend."""

    def __init__(self, binding: NixlBinding, options: Mapping[str, str]) -> None:
        self.binding = binding
        self.name = secrets.token_hex(8)
        """Unique: peers know an agent by it."""
        config = binding.api.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PROGRESS_THREAD_DELAY_US
        engine = engine_options(options)
        text = ",".join(f"{key}={value}" for key, value in engine.items())
        try:
            self.agent: Any = binding.api.nixlAgent(self.name, config)
            self.backend: int = self.agent.createBackend("UCX", {"ucx_error_handling_mode": "peer", "engine_config": text})
        except binding.errors as error:
            raise TransportError(f"NIXL: agent with {text}: {error}") from error

    def create_worker(self) -> NixlWorker:
        return NixlWorker(self.binding.api, self.binding.errors, self.agent, self.backend, self.name, self.binding.host)

    def allocate(self, nbytes: int) -> NixlMemory:
        return NixlMemory(self, None, nbytes)

    def register(self, address: int, nbytes: int) -> NixlMemory:
        return NixlMemory(self, address, nbytes)

    def close(self) -> None:
        """An interpreter that exits with a live agent crashes."""
        self.agent = None


class NixlMemory:
    def __init__(self, context: NixlContext, address: int | None, nbytes: int) -> None:
        self._context = context
        self._backing: mmap.mmap | None = None
        if address is None:
            self._backing = mmap.mmap(-1, nbytes)
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._backing))
        self.address = address
        self.nbytes = nbytes
        api = context.binding.api
        self._descriptors: Any = api.nixlRegDList(api.DRAM_SEG, [(address, nbytes, 0, "")])
        try:
            context.agent.registerMem(self._descriptors, [context.backend])
        except context.binding.errors as error:
            raise TransportError(f"NIXL: registering {nbytes} bytes: {error}") from error

    def pack_key(self) -> bytes:
        return bytes(self._context.agent.getLocalPartialMD(self._descriptors, False, [self._context.backend]))

    def close(self) -> None:
        if self._descriptors is not None:
            with contextlib.suppress(*self._context.binding.errors):
                self._context.agent.deregisterMem(self._descriptors, [self._context.backend])
            self._descriptors = None
            self._backing = None


def engine_options(options: Mapping[str, str]) -> dict[str, str]:
    """The options of a lane (lanes.py) as NIXL can take them: in one list that commas separate, so no value may hold one.

    Raises TransportError when this machine does not have the lane.
    """
    transports = options["TLS"].split(",")
    engine = {key: value for key, value in options.items() if key not in ("TLS", "ALLOC_PRIO")}
    # Messages keep their order on one connection only.
    engine |= {"MAX_EAGER_RAILS": "1", "MAX_RMA_RAILS": "1"}
    if "cuda_copy" in transports:
        raise TransportError("NIXL: pools in GPU memory are not supported here; use transport.name = ucx")
    if "posix" in transports:
        if not can_write_into_processes():
            raise TransportError("NIXL: process_vm_writev is not allowed here (yama ptrace_scope, seccomp)")
        return engine | {"POSIX_ERROR_HANDLING": "n", "SYSV_ERROR_HANDLING": "n", "NET_DEVICES": "lo"}
    if "rc" in transports:
        # Never run on hardware here.
        return engine | {"TLS": "ib", "NET_DEVICES": f"{rdma_devices()[0]}:1"}
    return engine | {"TLS": "tcp"}


def can_write_into_processes() -> bool:
    """process_vm_writev works, and is not kept to descendants."""
    with contextlib.suppress(OSError):
        if _PTRACE_SCOPE.read_text().strip() != "0":
            return False
    source, target = ctypes.create_string_buffer(b"1", 1), ctypes.create_string_buffer(1)
    vectors = [struct.pack("@PN", ctypes.addressof(buffer), 1) for buffer in (source, target)]
    written = ctypes.CDLL(None).process_vm_writev(os.getpid(), vectors[0], 1, vectors[1], 1, 0)
    return bool(written == 1 and target.raw == b"1")


def _import() -> tuple[Any, str]:
    """The library and its version."""
    problems: list[str] = []
    for module, package in _MODULES:
        try:
            return import_module(f"{module}._bindings"), version(package)
        except (ImportError, PackageNotFoundError) as error:
            problems.append(str(error))
    raise TransportUnavailableError(f"NIXL cannot be imported ({problems[0]}): pip install 'pd-serve[nixl]'")
