"""GET /control/traces of a worker, as its readers parse it: the router (waterfalls, spans) and `bench handover`.

The same facts as in protocol/traces.py, which frames them between a rank and its front; here every value has its name.
"""

from __future__ import annotations

import msgspec


class LayerPush(msgspec.Struct, frozen=True):
    """Seconds after `Transfer.origin_s`."""

    chunk: int
    layer: int
    kv_written_s: float
    push_start_s: float
    push_end_s: float
    nbytes: int


class Transfer(msgspec.Struct, frozen=True):
    """Of a prefill worker."""

    attempt_id: int
    num_tokens: int
    compute_end_s: float
    flushed_s: float
    lane: str
    overlap_ratio: float
    layers: tuple[LayerPush, ...]
    origin_s: float

    @property
    def exposed_s(self) -> float:
        """From the end of compute to the answer of the last flush: what the transfer adds to the request."""
        return max(0.0, self.flushed_s - self.compute_end_s)

    @property
    def layer_compute_s(self) -> float:
        """Compute of one layer of the last chunk, mean."""
        last = max(layer.chunk for layer in self.layers)
        written = [layer.kv_written_s for layer in self.layers if layer.chunk == last]
        return (self.compute_end_s - min(written)) / len(set(written))


class Leg(msgspec.Struct, frozen=True):
    """One leg of an attempt, moments."""

    attempt_id: int
    is_prefill_leg: bool
    received_s: float
    reserved_s: float | None
    record_s: float | None
    step_started_s: float | None
    step_ended_s: float | None


class Told(msgspec.Struct, frozen=True):
    """What one worker tells."""

    host: str
    """Its boot id, then the namespaces of its process: pd_serve.protocol.worker_traces.boot_of."""
    traces: tuple[Transfer, ...]
    attempts: tuple[Leg, ...]

    def leg(self, attempt_id: int, is_prefill: bool) -> Leg | None:
        return next((leg for leg in self.attempts if leg.attempt_id == attempt_id and leg.is_prefill_leg == is_prefill), None)

    def transfer(self, attempt_id: int) -> Transfer | None:
        return next((trace for trace in self.traces if trace.attempt_id == attempt_id), None)


def boot_of(host: str) -> str:
    """Equal for processes that share a monotonic clock: it runs from the boot of the kernel, whatever the container."""
    return host.partition(" ")[0]


_told = msgspec.json.Decoder(Told)


def parse_told(data: bytes) -> Told:
    """Raises msgspec.MsgspecError."""
    return _told.decode(data)
