"""The UCX contexts and workers of one process: one of each per lane, opened together and closed together.

On shared memory nobody sends messages: all senders would write into one queue of the receiver, and one that is killed between taking its
place in the queue and filling it makes the receiver deaf to everybody, for ever (seen within 10 to 20 kills under load). Peers of one host
talk over tcp, and put over shared memory: Ports.voice().

One worker per lane serves all peers. A worker per peer would be needed where UCX emulates puts (destroying it is the only way to stop a
silent writer there); here no lane emulates them: on tcp every byte is a checked message, which needs no fence.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from pd_serve.errors import TransportError, TransportUnavailableError
from pd_serve.transport.base import TransportSettings
from pd_serve.transport.ucx.lanes import Lane, lane_options, rdma_devices, wanted_lanes
from pd_serve.transport.ucx.seam import Binding

LOOPBACK = "127.0.0.1"
logger = logging.getLogger(__name__)


class Port:
    """One lane of this process."""

    def __init__(self, binding: Binding, lane: Lane, host: str, device: str) -> None:
        """Raises TransportError when this machine does not have the lane."""
        self.lane = lane
        self.context = binding.open_context(lane_options(lane, host, device), one_sided=lane.one_sided)
        try:
            self.worker = self.context.create_worker()
        except TransportError:
            self.context.close()
            raise
        self.address = self.worker.address()


class Ports:
    """All lanes of this process, best first."""

    def __init__(self, binding: Binding, settings: TransportSettings, device: str) -> None:
        """Raises ConfigError for an unknown lane, TransportUnavailableError when none of those allowed can be had."""
        self._ports: dict[Lane, Port] = {}
        self._voice_of_shm: Port | None = None
        failures: list[str] = []
        for lane in wanted_lanes(settings.lanes):
            if lane is Lane.RDMA and not rdma_devices():
                failures.append("rdma: no device")
                continue
            try:
                self._ports[lane] = Port(binding, lane, settings.host, device)
            except TransportError as error:
                failures.append(f"{lane.value}: {error}")
        if Lane.SHM in self._ports:
            try:
                self._voice_of_shm = self._ports.get(Lane.TCP) or Port(binding, Lane.TCP, LOOPBACK, "cpu")
            except TransportError as error:
                self._close_port(self._ports.pop(Lane.SHM))
                failures.append(f"shm: no messages over tcp on this host: {error}")
        if not self._ports:
            raise TransportUnavailableError(f"no lane of `{settings.lanes}` is available: {'; '.join(failures)}")
        logger.info("UCX %s (%s): lanes %s", binding.version, binding.name, ", ".join(lane.label for lane in self._ports))

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return tuple(self._ports)

    def __iter__(self) -> Iterator[Port]:
        """Those that need progress: one per lane, and the voice of shared memory where tcp is no lane."""
        yield from self._ports.values()
        if self._voice_of_shm is not None and Lane.TCP not in self._ports:
            yield self._voice_of_shm

    def voice(self, lane: Lane) -> Port:
        """What carries the messages of peers that write over the lane."""
        if lane is Lane.SHM:
            assert self._voice_of_shm is not None
            return self._voice_of_shm
        return self._ports[lane]

    def get(self, lane: Lane) -> Port | None:
        return self._ports.get(lane)

    def __getitem__(self, lane: Lane) -> Port:
        return self._ports[lane]

    def close_workers(self) -> None:
        for port in self:
            port.worker.close()

    def close_contexts(self) -> None:
        """After the workers and all memory of the contexts."""
        for port in self:
            port.context.close()

    @staticmethod
    def _close_port(port: Port) -> None:
        port.worker.close()
        port.context.close()
