"""What a mock worker would tell of its requests at GET /control/traces: moments invented around those at which frames reached it."""

from __future__ import annotations

import msgspec

from pd_serve.protocol.link import Open, Prefill
from pd_serve.protocol.worker_traces import LayerPush, Leg, Told, Transfer
from router.worker_traces import boot_id
from tests.fakes_worker import MockWorker

NUM_LAYERS = 6
LAYER_S = 0.001
LAYER_NBYTES = 4096


def told_by(worker: MockWorker, host: str = "", clock_shift_s: float = 0.0) -> bytes:
    """`host`: by default that of the router; `clock_shift_s`: of the worker's clock from the router's."""
    legs: list[Leg] = []
    transfers: list[Transfer] = []
    for frame, at in zip(worker.received, worker.received_at, strict=True):
        at += clock_shift_s
        if isinstance(frame, Open):
            legs.append(Leg(frame.attempt_id, False, at, at + 0.0001, at + 0.0002, at + 0.0003, at + 0.001))
        elif isinstance(frame, Prefill):
            end = NUM_LAYERS * LAYER_S
            legs.append(Leg(frame.attempt_id, True, at, None, None, at, at + end))
            transfers.append(Transfer(frame.attempt_id, len(frame.token_ids), end, end + 0.0005, "shm", 0.83, _layers(), at))
    return msgspec.json.encode(Told(host or f"{boot_id()} ipc pid", tuple(transfers), tuple(legs)))


def _layers() -> tuple[LayerPush, ...]:
    starts = [layer * LAYER_S for layer in range(NUM_LAYERS)]
    return tuple(LayerPush(0, layer, start, start, start + 0.0012, LAYER_NBYTES) for layer, start in enumerate(starts))
