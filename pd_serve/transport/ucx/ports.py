"""The UCX contexts and workers of one process: one of each per lane, opened together and closed together.

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
        failures: list[str] = []
        for lane in wanted_lanes(settings.lanes):
            if lane is Lane.RDMA and not rdma_devices():
                failures.append("rdma: no device")
                continue
            try:
                self._ports[lane] = Port(binding, lane, settings.host, device)
            except TransportError as error:
                failures.append(f"{lane.value}: {error}")
        if not self._ports:
            raise TransportUnavailableError(f"no lane of `{settings.lanes}` is available: {'; '.join(failures)}")
        logger.info("UCX %s (%s): lanes %s", binding.version, binding.name, ", ".join(lane.label for lane in self._ports))

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return tuple(self._ports)

    def __iter__(self) -> Iterator[Port]:
        return iter(self._ports.values())

    def get(self, lane: Lane) -> Port | None:
        return self._ports.get(lane)

    def __getitem__(self, lane: Lane) -> Port:
        return self._ports[lane]

    def close_workers(self) -> None:
        for port in self._ports.values():
            port.worker.close()

    def close_contexts(self) -> None:
        """After the workers and all memory of the contexts."""
        for port in self._ports.values():
            port.context.close()
