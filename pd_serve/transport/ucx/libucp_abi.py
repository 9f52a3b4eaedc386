"""Structures and signatures of libucp as ctypes, from ucp.h of UCX 1.18 to 1.22. Data only; libucp.py makes the calls.

Structures start with a field mask (or op_attr_mask) and the library reads the masked fields only, so a newer header appends.
"""

from __future__ import annotations

import ctypes as C
from ctypes import c_char_p, c_int, c_int8, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any

STATUS_OK = 0
STATUS_IN_PROGRESS = 1
STATUS_BUSY = -15
POINTER_ERROR = 2**64 - 100
"""ucs_status_ptr_t at or above this is a negative status, not a request."""

FEATURE_RMA = 1 << 1
FEATURE_WAKEUP = 1 << 4
FEATURE_AM = 1 << 6

OP_FLAGS = 1 << 4
OP_MEMH = 1 << 8
OP_MULTI_SEND = 1 << 19
AM_SEND_EAGER = 1 << 1
AM_SEND_COPY_HEADER = 1 << 3
AM_WHOLE_MESSAGE = 1
AM_RECV_RENDEZVOUS = 1 << 17
EP_CLOSE_FORCE = 1
MEM_MAP_ALLOCATE = 2
MEM_MAP_FIXED = 4
ERROR_MODE_PEER = 1
THREAD_MODE_SINGLE = 0

ErrorCallback = C.CFUNCTYPE(None, c_void_p, c_void_p, c_int8)
MessageCallback = C.CFUNCTYPE(c_int8, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p)


class ContextParams(C.Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("features", c_uint64),
        ("request_size", c_size_t),
        ("request_init", c_void_p),
        ("request_cleanup", c_void_p),
        ("tag_sender_mask", c_uint64),
        ("mt_workers_shared", c_int),
        ("estimated_num_eps", c_size_t),
        ("estimated_num_ppn", c_size_t),
        ("name", c_char_p),
        ("node_local_id", c_size_t),
    )


class WorkerParams(C.Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("thread_mode", c_int),
        ("cpu_mask", C.c_ulong * 16),
        ("events", c_uint),
        ("user_data", c_void_p),
        ("event_fd", c_int),
        ("flags", c_uint64),
        ("name", c_char_p),
        ("am_alignment", c_size_t),
        ("client_id", c_uint64),
    )


class EndpointParams(C.Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("err_mode", c_int),
        ("err_cb", ErrorCallback),
        ("err_arg", c_void_p),
        ("user_data", c_void_p),
        ("flags", c_uint),
        ("sockaddr", c_void_p),
        ("addrlen", c_uint),
        ("conn_request", c_void_p),
        ("name", c_char_p),
        ("local_sockaddr", c_void_p),
        ("local_addrlen", c_uint),
    )


class MapParams(C.Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("flags", c_uint),
        ("prot", c_uint),
        ("memory_type", c_int),
        ("exported", c_void_p),
    )


class MemoryAttributes(C.Structure):
    _fields_ = (("field_mask", c_uint64), ("address", c_void_p), ("length", c_size_t), ("mem_type", c_int))


class RequestParam(C.Structure):
    _fields_ = (
        ("op_attr_mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("cb", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
        ("reserved", c_void_p * 8),
    )


class MessageHandler(C.Structure):
    _fields_ = (("field_mask", c_uint64), ("id", c_uint), ("flags", c_uint32), ("cb", MessageCallback), ("arg", c_void_p))


_SIGNATURES: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("ucp_get_version", None, (c_void_p, c_void_p, c_void_p)),
    ("ucp_config_read", c_int8, (c_char_p, c_char_p, c_void_p)),
    ("ucp_config_modify", c_int8, (c_void_p, c_char_p, c_char_p)),
    ("ucp_config_release", None, (c_void_p,)),
    ("ucp_init_version", c_int8, (c_uint, c_uint, c_void_p, c_void_p, c_void_p)),
    ("ucp_cleanup", None, (c_void_p,)),
    ("ucp_worker_create", c_int8, (c_void_p, c_void_p, c_void_p)),
    ("ucp_worker_destroy", None, (c_void_p,)),
    ("ucp_worker_get_address", c_int8, (c_void_p, c_void_p, c_void_p)),
    ("ucp_worker_release_address", None, (c_void_p, c_void_p)),
    ("ucp_worker_get_efd", c_int8, (c_void_p, c_void_p)),
    ("ucp_worker_arm", c_int8, (c_void_p,)),
    ("ucp_worker_progress", c_uint, (c_void_p,)),
    ("ucp_worker_set_am_recv_handler", c_int8, (c_void_p, c_void_p)),
    ("ucp_mem_map", c_int8, (c_void_p, c_void_p, c_void_p)),
    ("ucp_mem_unmap", c_int8, (c_void_p, c_void_p)),
    ("ucp_mem_query", c_int8, (c_void_p, c_void_p)),
    ("ucp_rkey_pack", c_int8, (c_void_p, c_void_p, c_void_p, c_void_p)),
    ("ucp_rkey_buffer_release", None, (c_void_p,)),
    ("ucp_ep_create", c_int8, (c_void_p, c_void_p, c_void_p)),
    ("ucp_ep_close_nbx", c_void_p, (c_void_p, c_void_p)),
    ("ucp_ep_rkey_unpack", c_int8, (c_void_p, c_void_p, c_void_p)),
    ("ucp_rkey_ptr", c_int8, (c_void_p, c_uint64, c_void_p)),
    ("ucp_rkey_destroy", None, (c_void_p,)),
    ("ucp_put_nbx", c_void_p, (c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, c_void_p)),
    ("ucp_ep_flush_nbx", c_void_p, (c_void_p, c_void_p)),
    ("ucp_am_send_nbx", c_void_p, (c_void_p, c_uint, c_char_p, c_size_t, c_void_p, c_size_t, c_void_p)),
    ("ucp_request_check_status", c_int8, (c_void_p,)),
    ("ucp_request_free", None, (c_void_p,)),
)


def declare(library: C.CDLL) -> None:
    """Give every function used its argument and result types."""
    for name, result, arguments in _SIGNATURES:
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
