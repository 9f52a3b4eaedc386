"""The binding to libucp through ctypes: the PyPI libucx wheel, or the system's UCX (RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true).

Interpreter lock: every call releases it, except puts of at most LOCKED_NBYTES: on shared memory such a put is a copy of a few
microseconds made inside the call. Data of queued lanes moves inside `progress`, which releases the lock; message handlers take it back.
"""

from __future__ import annotations

import ctypes as C
import os
from collections.abc import Mapping, Sequence
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p
from importlib import import_module

from pd_serve.errors import TransportError, TransportUnavailableError
from pd_serve.transport.native.ranges import LOCKED_NBYTES
from pd_serve.transport.ucx import libucp_abi as abi
from pd_serve.transport.ucx import seam
from pd_serve.transport.ucx.pages import HUGE_NBYTES, release, reserve

MIN_VERSION = (1, 18)


class LibucpBinding:
    """Raises TransportUnavailableError when no usable libucp is found."""

    name = "libucp"
    messaging = "am"

    def __init__(self) -> None:
        # Read by UCX when it is loaded: its log goes to stdout and complains of unused variables otherwise.
        os.environ.setdefault("UCX_LOG_FILE", "stderr")
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        self.ucp, self._ucs, self.location = _load()
        abi.declare(self.ucp)
        self.ucp_locked = C.PyDLL("", handle=self.ucp._handle)
        abi.declare(self.ucp_locked)
        self._ucs.ucs_status_string.restype = C.c_char_p
        self._ucs.ucs_status_string.argtypes = (C.c_int8,)
        major, minor, patch = c_uint(), c_uint(), c_uint()
        self.ucp.ucp_get_version(byref(major), byref(minor), byref(patch))
        self.version_numbers = (major.value, minor.value)
        self.version = f"{major.value}.{minor.value}.{patch.value}"
        if self.version_numbers < MIN_VERSION:
            raise TransportUnavailableError(f"UCX {self.version} at {self.location} is older than {MIN_VERSION[0]}.{MIN_VERSION[1]}")

    def describe(self, status: int) -> str:
        text: bytes = self._ucs.ucs_status_string(status)
        return text.decode()

    def check(self, status: int, what: str) -> None:
        if status < 0:
            raise TransportError(f"UCX: {what}: {self.describe(status)}")

    def open_context(self, options: Mapping[str, str], one_sided: bool) -> LibucpContext:
        return LibucpContext(self, options, one_sided)


def _load() -> tuple[C.CDLL, C.CDLL, str]:
    try:
        libucx = import_module("libucx")
    except ImportError:
        try:
            return C.CDLL("libucp.so.0"), C.CDLL("libucs.so.0"), "system"
        except OSError as error:
            raise TransportUnavailableError("no UCX library: install pd-serve[ucx] or a system UCX (libucp.so.0)") from error
    try:
        ucs, _, _, ucp = libucx.load_library()
    except OSError as error:
        raise TransportUnavailableError(f"the libucx package cannot be loaded: {error}") from error
    if ucp is None or ucs is None:
        raise TransportUnavailableError("the libucx package holds no library: reinstall pd-serve[ucx]")
    return ucp, ucs, str(ucp._name)


class LibucpContext:
    def __init__(self, binding: LibucpBinding, options: Mapping[str, str], one_sided: bool) -> None:
        self.binding = binding
        self.handle = c_void_p()
        features = abi.FEATURE_AM | abi.FEATURE_WAKEUP | (abi.FEATURE_RMA if one_sided else 0)
        config = c_void_p()
        ucp = binding.ucp
        binding.check(ucp.ucp_config_read(None, None, byref(config)), "ucp_config_read")
        try:
            for key, value in options.items():
                binding.check(ucp.ucp_config_modify(config, key.encode(), value.encode()), f"option {key}={value}")
            params = abi.ContextParams(field_mask=1, features=features)
            major, minor = binding.version_numbers
            status = ucp.ucp_init_version(major, minor, byref(params), config, byref(self.handle))
        finally:
            ucp.ucp_config_release(config)
        binding.check(status, f"ucp_init with {dict(options)}")

    def create_worker(self) -> LibucpWorker:
        return LibucpWorker(self)

    def allocate(self, nbytes: int) -> LibucpMemory:
        return LibucpMemory(self, None, nbytes)

    def register(self, address: int, nbytes: int) -> LibucpMemory:
        return LibucpMemory(self, address, nbytes)

    def close(self) -> None:
        if self.handle:
            self.binding.ucp.ucp_cleanup(self.handle)
            self.handle = c_void_p()


class LibucpMemory:
    def __init__(self, context: LibucpContext, address: int | None, nbytes: int) -> None:
        self._context = context
        self.handle = c_void_p()
        binding = context.binding
        # Memory of its own lies where huge pages can be used, if the library takes an address for it.
        flags = abi.MEM_MAP_ALLOCATE if address is None else 0
        reserved = reserve(nbytes) if address is None and nbytes >= HUGE_NBYTES else None
        if reserved is not None and self._map(reserved, nbytes, flags | abi.MEM_MAP_FIXED) < 0:
            release(reserved, nbytes)
            reserved = None
        if reserved is None:
            binding.check(self._map(address, nbytes, flags), f"mapping {nbytes} bytes")
        if address is None:
            attributes = abi.MemoryAttributes(field_mask=3)
            binding.check(binding.ucp.ucp_mem_query(self.handle, byref(attributes)), "ucp_mem_query")
            address = attributes.address
        self.address: int = address or 0
        self.nbytes = nbytes
        self.put_param = abi.RequestParam(op_attr_mask=abi.OP_MEMH | abi.OP_MULTI_SEND, memh=self.handle.value)

    def _map(self, address: int | None, nbytes: int, flags: int) -> int:
        params = abi.MapParams(field_mask=2 | 4 | (0 if address is None else 1), address=address, length=nbytes, flags=flags)
        status: int = self._context.binding.ucp.ucp_mem_map(self._context.handle, byref(params), byref(self.handle))
        return status

    def pack_key(self) -> bytes:
        binding = self._context.binding
        buffer, nbytes = c_void_p(), c_size_t()
        status = binding.ucp.ucp_rkey_pack(self._context.handle, self.handle, byref(buffer), byref(nbytes))
        binding.check(status, "ucp_rkey_pack")
        packed = C.string_at(buffer, nbytes.value)
        binding.ucp.ucp_rkey_buffer_release(buffer)
        return packed

    def close(self) -> None:
        if self.handle:
            self._context.binding.ucp.ucp_mem_unmap(self._context.handle, self.handle)
            self.handle = c_void_p()


class LibucpWorker:
    def __init__(self, context: LibucpContext) -> None:
        self._context = context
        self.binding = context.binding
        self.handle = c_void_p()
        self._callbacks: dict[seam.Channel, object] = {}
        self._raised: list[BaseException] = []
        self._retired: list[tuple[LibucpEndpoint, LibucpRequest]] = []
        ucp = self.binding.ucp
        params = abi.WorkerParams(field_mask=1, thread_mode=abi.THREAD_MODE_SINGLE)
        self.binding.check(ucp.ucp_worker_create(context.handle, byref(params), byref(self.handle)), "ucp_worker_create")
        efd = c_int()
        self.binding.check(ucp.ucp_worker_get_efd(self.handle, byref(efd)), "ucp_worker_get_efd")
        self.efd = efd.value

    def address(self) -> bytes:
        ucp = self.binding.ucp
        buffer, nbytes = c_void_p(), c_size_t()
        self.binding.check(ucp.ucp_worker_get_address(self.handle, byref(buffer), byref(nbytes)), "ucp_worker_get_address")
        packed = C.string_at(buffer, nbytes.value)
        ucp.ucp_worker_release_address(self.handle, buffer)
        return packed

    def progress(self) -> bool:
        moved: bool = self.binding.ucp.ucp_worker_progress(self.handle) != 0
        if self._raised:
            raise self._raised.pop(0)
        return moved

    def arm(self) -> bool:
        status = self.binding.ucp.ucp_worker_arm(self.handle)
        if status == abi.STATUS_BUSY:
            return False
        self.binding.check(status, "ucp_worker_arm")
        return True

    def set_receiver(self, channel: seam.Channel, receiver: seam.Receiver) -> None:
        string_at, attributes = C.string_at, C.c_uint64.from_address

        def on_message(_arg: int, header: int, header_nbytes: int, data: int, nbytes: int, params: int) -> int:
            if attributes(params).value & abi.AM_RECV_RENDEZVOUS:
                return 0  # never asked for: nothing is fetched, the message is dropped
            try:
                receiver(string_at(header, header_nbytes) if header_nbytes else b"", data or 0, nbytes)
            except BaseException as error:  # noqa: BLE001  C cannot take an exception; progress() raises it
                self._raised.append(error)
            return 0

        callback = abi.MessageCallback(on_message)
        handler = abi.MessageHandler(field_mask=1 | 2 | 4, id=int(channel), flags=abi.AM_WHOLE_MESSAGE, cb=callback)
        status = self.binding.ucp.ucp_worker_set_am_recv_handler(self.handle, byref(handler))
        self.binding.check(status, "ucp_worker_set_am_recv_handler")
        self._callbacks[channel] = callback

    def connect(self, address: bytes) -> LibucpEndpoint:
        return LibucpEndpoint(self, address)

    def retire(self, endpoint: LibucpEndpoint, closing: LibucpRequest) -> None:
        """Keep a closed endpoint's error callback alive until UCX has finished closing it."""
        self._retired = [entry for entry in self._retired if entry[1].poll() == seam.IN_PROGRESS]
        self._retired.append((endpoint, closing))

    def close(self) -> None:
        if self.handle:
            self.binding.ucp.ucp_worker_destroy(self.handle)
            self.handle = c_void_p()
            self._callbacks.clear()
            self._retired.clear()


class LibucpRequest:
    """A ucs_status_ptr_t: None is done, a value in the last hundred is an error, else a request to be freed once."""

    __slots__ = ("_pointer", "_status", "_ucp")

    def __init__(self, ucp: C.CDLL, pointer: int | None) -> None:
        self._ucp = ucp
        self._pointer: int | None = None
        if pointer is None:
            self._status = seam.OK
        elif pointer >= abi.POINTER_ERROR:
            self._status = pointer - 2**64
        else:
            self._pointer = pointer
            self._status = seam.IN_PROGRESS

    def poll(self) -> int:
        if self._pointer is not None:
            status: int = self._ucp.ucp_request_check_status(self._pointer)
            if status == abi.STATUS_IN_PROGRESS:
                return seam.IN_PROGRESS
            self._ucp.ucp_request_free(self._pointer)
            self._pointer = None
            self._status = status
        return self._status

    def release(self) -> None:
        if self._pointer is not None:
            self._ucp.ucp_request_free(self._pointer)
            self._pointer = None


class LibucpKey:
    def __init__(self, ucp: C.CDLL, handle: c_void_p) -> None:
        self._ucp = ucp
        self.handle = handle

    def address_here(self, address: int, nbytes: int) -> int | None:
        first, last = c_void_p(), c_void_p()
        for pointer, wanted in ((first, address), (last, address + nbytes - 1)):
            if self._ucp.ucp_rkey_ptr(self.handle, wanted, byref(pointer)) != abi.STATUS_OK:
                return None
        return first.value

    def close(self) -> None:
        if self.handle:
            self._ucp.ucp_rkey_destroy(self.handle)
            self.handle = c_void_p()


class LibucpEndpoint:
    def __init__(self, worker: LibucpWorker, address: bytes) -> None:
        self._binding = worker.binding
        self._worker = worker
        self._handle = c_void_p()
        self._failure: str | None = None
        self._callback = abi.ErrorCallback(self._on_error)
        self._address = C.create_string_buffer(address, len(address))
        params = abi.EndpointParams(
            field_mask=1 | 2 | 4, address=C.addressof(self._address), err_mode=abi.ERROR_MODE_PEER, err_cb=self._callback
        )
        self._binding.check(self._binding.ucp.ucp_ep_create(worker.handle, byref(params), byref(self._handle)), "ucp_ep_create")
        self._plain_param = abi.RequestParam()
        self._send_param = abi.RequestParam(op_attr_mask=abi.OP_FLAGS, flags=abi.AM_SEND_EAGER | abi.AM_SEND_COPY_HEADER)
        self._send_param_address = C.addressof(self._send_param)

    def _on_error(self, _arg: int, _endpoint: int, status: int) -> None:
        if self._failure is None:
            self._failure = self._binding.describe(status)

    @property
    def failure(self) -> str | None:
        return self._failure

    def unpack_key(self, packed: bytes) -> LibucpKey:
        key = c_void_p()
        buffer = C.create_string_buffer(packed, len(packed))
        self._binding.check(self._binding.ucp.ucp_ep_rkey_unpack(self._handle, buffer, byref(key)), "ucp_ep_rkey_unpack")
        return LibucpKey(self._binding.ucp, key)

    def put(
        self, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int], key: seam.RemoteKey, memory: seam.Memory | None
    ) -> int:
        assert isinstance(key, LibucpKey)
        assert memory is None or isinstance(memory, LibucpMemory)
        if self._failure is not None:
            return 0
        put_locked, put_unlocked = self._binding.ucp_locked.ucp_put_nbx, self._binding.ucp.ucp_put_nbx
        free = self._binding.ucp.ucp_request_free
        endpoint, rkey = self._handle.value, key.handle.value
        param = C.addressof(self._plain_param if memory is None else memory.put_param)
        num_queued = 0
        for source, target, nbytes in zip(local, remote, sizes, strict=True):
            put = put_locked if nbytes <= LOCKED_NBYTES else put_unlocked
            request = put(endpoint, source, nbytes, target, rkey, param)
            if request is None:
                continue
            if request >= abi.POINTER_ERROR:
                self._failure = self._failure or self._binding.describe(request - 2**64)
                break
            free(request)  # only the flush is waited for
            num_queued += 1
        return num_queued

    def flush(self) -> LibucpRequest:
        ucp = self._binding.ucp
        return LibucpRequest(ucp, ucp.ucp_ep_flush_nbx(self._handle, byref(self._plain_param)))

    def send(self, channel: seam.Channel, header: bytes, address: int = 0, nbytes: int = 0) -> LibucpRequest:
        ucp = self._binding.ucp
        pointer = ucp.ucp_am_send_nbx(self._handle, channel, header, len(header), address, nbytes, self._send_param_address)
        return LibucpRequest(ucp, pointer)

    def close(self) -> None:
        if self._handle:
            param = abi.RequestParam(op_attr_mask=abi.OP_FLAGS, flags=abi.EP_CLOSE_FORCE)
            ucp = self._binding.ucp
            request = LibucpRequest(ucp, ucp.ucp_ep_close_nbx(self._handle, byref(param)))
            self._handle = c_void_p()
            self._failure = self._failure or "closed"
            self._worker.retire(self, request)
