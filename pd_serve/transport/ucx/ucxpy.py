"""The binding to UCX through ucx-py (`ucp._libs.ucx_api`), where that is installed.

ucx-py's files on the public package index are stubs that fetch the real wheel from elsewhere: it is an optional extra, imported only here.
Its active messages belong to an endpoint that the receiver has made, which a hello from someone new has not; tags do not, so messages are
tagged sends here (`messaging = "tag"`), into receives that are always posted. A message is, in one buffer,

    [header length u32][payload length u32][header][payload]

What ucx-py does not offer: progress that tells whether something moved (callbacks are counted instead), and closing a healthy endpoint by
force. Its graceful close waits inside the library for a peer that may have stopped, so the endpoint is marked as failed first, in the
status that its finalizer looks at (`_status_address`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from pd_serve.errors import TransportError, TransportUnavailableError
from pd_serve.transport.ucx import seam
from pd_serve.transport.ucx.writer import MAX_PIECE_NBYTES

_FRAME = struct.Struct("<II")
CONTROL_SLOT_NBYTES = _FRAME.size + seam.MAX_HEADER_NBYTES
DATA_SLOT_NBYTES = CONTROL_SLOT_NBYTES + MAX_PIECE_NBYTES
NUM_SLOTS = 32
"""Receives posted per channel; more messages than that wait inside UCX until some have been handled."""
FAILED = -1
CANCELED = -16
"""UCS_ERR_CANCELED."""


class UcxPyBinding:
    """Raises TransportUnavailableError when ucx-py cannot be imported."""

    name = "ucxpy"
    messaging = "tag"

    def __init__(self) -> None:
        os.environ.setdefault("UCX_LOG_FILE", "stderr")
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of packages that ucx-py imports
                ucp = import_module("ucp")  # before ucx_api: it loads the library
                self.api: Any = import_module("ucp._libs.ucx_api")
                self.array: Any = import_module("ucp._libs.arr").Array
                self.error: type[Exception] = import_module("ucp._libs.exceptions").UCXBaseException
                self.truncated: type[Exception] = import_module("ucp._libs.exceptions").UCXMsgTruncated
        except ImportError as error:
            raise TransportUnavailableError(f"ucx-py cannot be imported ({error}): install pd-serve[ucx-py]") from error
        self.version = ".".join(str(number) for number in ucp.get_ucx_version())
        self.location = str(self.api.__file__)

    def open_context(self, options: Mapping[str, str], one_sided: bool) -> UcxPyContext:
        return UcxPyContext(self, options, one_sided)


class UcxPyContext:
    def __init__(self, binding: UcxPyBinding, options: Mapping[str, str], one_sided: bool) -> None:
        self.binding = binding
        feature = binding.api.Feature
        features = (feature.TAG, feature.WAKEUP, *((feature.RMA,) if one_sided else ()))
        try:
            # A rendezvous would have the receiver fetch from the sender: messages are small enough to go at once.
            self.context: Any = binding.api.UCXContext({**options, "RNDV_THRESH": "inf"}, feature_flags=features)
        except binding.error as error:
            raise TransportError(f"UCX: context with {dict(options)}: {error}") from error

    def create_worker(self) -> UcxPyWorker:
        return UcxPyWorker(self)

    def allocate(self, nbytes: int) -> UcxPyMemory:
        return UcxPyMemory(self, None, nbytes)

    def register(self, address: int, nbytes: int) -> UcxPyMemory:
        return UcxPyMemory(self, address, nbytes)

    def close(self) -> None:
        self.context.close()


class UcxPyMemory:
    def __init__(self, context: UcxPyContext, address: int | None, nbytes: int) -> None:
        binding = context.binding
        try:
            if address is None:
                self._handle: Any = context.context.alloc(nbytes)
                address = int(self._handle.address)
            else:
                # Only the address is used (UCX finds out what memory it is), so a GPU's address serves as well.
                self._handle = context.context.map((ctypes.c_ubyte * nbytes).from_address(address))
        except binding.error as error:
            raise TransportError(f"UCX: mapping {nbytes} bytes: {error}") from error
        self.address = address
        self.nbytes = nbytes

    def pack_key(self) -> bytes:
        return bytes(self._handle.pack_rkey())

    def close(self) -> None:
        self._handle.close()


class UcxPyRequest:
    """Finished by its callback; `keep` stays alive until then."""

    __slots__ = ("_keep", "_status")

    def __init__(self, keep: object = None) -> None:
        self._keep = keep
        self._status = seam.IN_PROGRESS

    def finish(self, _request: object, exception: Exception | None) -> None:
        self._status = seam.OK if exception is None else FAILED
        self._keep = None

    def poll(self) -> int:
        return self._status

    def release(self) -> None:
        """ucx-py frees requests itself."""


class UcxPyWorker:
    def __init__(self, context: UcxPyContext) -> None:
        self.binding = context.binding
        self.worker: Any = self.binding.api.UCXWorker(context.context)
        self.efd: int = self.worker.init_blocking_progress_mode()
        self.has_failures = False
        self._slots: dict[seam.Channel, list[bytearray]] = {}
        self._to_post: list[tuple[seam.Channel, int]] = []
        self._raised: list[BaseException] = []
        self._num_events = 0
        self._receivers: dict[seam.Channel, seam.Receiver] = {}

    def address(self) -> bytes:
        return bytes(self.worker.get_address())

    def progress(self) -> bool:
        before = self._num_events
        self.worker.progress()
        while self._to_post:  # a receive that finds a waiting message is done at once and is posted again
            self._post(*self._to_post.pop())
        if self.has_failures:
            self.has_failures = False
            self.worker.cancel_inflight_messages()
        if self._raised:
            raise self._raised.pop(0)
        return self._num_events != before

    def arm(self) -> bool:
        return not self._to_post and bool(self.worker.arm())

    def set_receiver(self, channel: seam.Channel, receiver: seam.Receiver) -> None:
        self._receivers[channel] = receiver
        nbytes = DATA_SLOT_NBYTES if channel is seam.Channel.DATA else CONTROL_SLOT_NBYTES
        self._slots[channel] = [bytearray(nbytes) for _ in range(NUM_SLOTS)]
        for index in range(NUM_SLOTS):
            self._post(channel, index)

    def connect(self, address: bytes) -> UcxPyEndpoint:
        return UcxPyEndpoint(self, address)

    def finisher(self, keep: object = None) -> tuple[UcxPyRequest, Callable[[object, Exception | None], None]]:
        request = UcxPyRequest(keep)

        def finish(ucx_request: object, exception: Exception | None) -> None:
            self._num_events += 1
            request.finish(ucx_request, exception)

        return request, finish

    def close(self) -> None:
        self._receivers.clear()
        self.worker.close()
        os.close(self.efd)

    def _post(self, channel: seam.Channel, index: int) -> None:
        slot = self._slots[channel][index]

        def on_received(_request: object, exception: Exception | None) -> None:
            self._num_events += 1
            # Shorter than the slot is the rule here, and ucx-py's word for it. Anything else (cancelled, too long) is no message.
            receiver = self._receivers.get(channel)
            if receiver is None:
                return
            if exception is None or isinstance(exception, self.binding.truncated):
                try:
                    self._hand_over(slot, receiver)
                except BaseException as error:  # noqa: BLE001  C cannot take an exception; progress() raises it
                    self._raised.append(error)
            self._to_post.append((channel, index))

        try:
            self.binding.api.tag_recv_nb(self.worker, self.binding.array(slot), len(slot), int(channel), on_received)
        except self.binding.truncated as error:
            on_received(None, error)  # a message was waiting and was shorter, which this one way of completing tells by raising

    @staticmethod
    def _hand_over(slot: bytearray, receiver: seam.Receiver) -> None:
        header_nbytes, nbytes = _FRAME.unpack_from(slot)
        start = _FRAME.size + header_nbytes
        if start + nbytes <= len(slot):
            address = ctypes.addressof(ctypes.c_char.from_buffer(slot))
            receiver(bytes(slot[_FRAME.size : start]), address + start, nbytes)


class UcxPyKey:
    def __init__(self, binding: UcxPyBinding, key: Any) -> None:
        self._binding = binding
        self.key = key

    def address_here(self, address: int, nbytes: int) -> int | None:
        """ucx-py does not say."""
        return None

    def close(self) -> None:
        with contextlib.suppress(self._binding.error):  # of a failed endpoint: ucx-py wants to flush first
            self.key.close()


class UcxPyEndpoint:
    def __init__(self, worker: UcxPyWorker, address: bytes) -> None:
        self._worker = worker
        self._binding = worker.binding
        self._failure: str | None = None
        api = self._binding.api
        try:
            self._endpoint: Any = api.UCXEndpoint.create_from_worker_address(worker.worker, api.UCXAddress.from_buffer(address), True)
        except self._binding.error as error:
            raise TransportError(f"UCX: connecting: {error}") from error
        self._endpoint.set_close_callback(self._on_failure)

    def _on_failure(self) -> None:
        self._worker.has_failures = True

    @property
    def failure(self) -> str | None:
        if self._failure is None and not self._endpoint.is_alive():
            self._failure = "connection lost"
        return self._failure

    def unpack_key(self, packed: bytes) -> UcxPyKey:
        try:
            return UcxPyKey(self._binding, self._endpoint.unpack_rkey(self._binding.api.PackedRemoteKey.from_buffer(packed)))
        except self._binding.error as error:
            raise TransportError(f"UCX: unpacking a key: {error}") from error

    def put(
        self, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int], key: seam.RemoteKey, memory: seam.Memory | None
    ) -> int:
        assert isinstance(key, UcxPyKey)
        if self.failure is not None:
            return 0
        put_nbi, array, rkey = self._binding.api.put_nbi, self._binding.array, key.key
        num_queued = 0
        try:
            for source, target, nbytes in zip(local, remote, sizes, strict=True):
                if not put_nbi(array((ctypes.c_ubyte * nbytes).from_address(source)), nbytes, target, rkey):
                    num_queued += 1
        except self._binding.error as error:
            self._failure = str(error)
        return num_queued

    def flush(self) -> UcxPyRequest:
        request, finish = self._worker.finisher()
        self._start(request, lambda: self._endpoint.flush(finish))
        return request

    def send(self, channel: seam.Channel, header: bytes, address: int = 0, nbytes: int = 0) -> UcxPyRequest:
        message = bytearray(_FRAME.size + len(header) + nbytes)
        _FRAME.pack_into(message, 0, len(header), nbytes)
        start = _FRAME.size + len(header)
        message[_FRAME.size : start] = header
        if nbytes:
            ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(message)) + start, address, nbytes)
        array = self._binding.array(message)
        request, finish = self._worker.finisher(array)
        self._start(request, lambda: self._binding.api.tag_send_nb(self._endpoint, array, len(message), int(channel), finish))
        return request

    def close(self) -> None:
        if self._failure == "closed":
            return
        address = _status_address(self._endpoint)
        if address is not None:
            ctypes.c_int8.from_address(address).value = CANCELED
        with contextlib.suppress(self._binding.error):
            self._endpoint.close()
        self._failure = "closed"

    def _start(self, request: UcxPyRequest, operation: Callable[[], object]) -> None:
        """ucx-py returns None, without a callback, for what was done at once."""
        try:
            if operation() is None and request.poll() == seam.IN_PROGRESS:
                request.finish(None, None)
        except self._binding.error as error:
            self._failure = self._failure or str(error)
            request.finish(None, error)


def _status_address(endpoint: Any) -> int | None:
    """Where ucx-py keeps the status of this endpoint: the second argument of its finalizer. None when it cannot be found."""
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        found = finalizer.peek()
        if found is not None and found[0] is endpoint:
            arguments = found[2]  # children, finalizer of the handle, handle, address of the status, ...
            return int(arguments[3]) if len(arguments) > 3 and arguments[3] else None
    return None
