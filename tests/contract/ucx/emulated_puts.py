"""The agent with the historic mistake planted: puts over tcp, which UCX carries out in the target's progress (F39)."""

from __future__ import annotations

from pd_serve.transport.ucx.lanes import Lane
from pd_serve.transport.ucx.pool import Pool, _round_up
from pd_serve.transport.ucx.ports import Ports
from tests.contract.ucx.agent import Agent


def plant() -> None:
    """The tcp context gets the RMA feature, and peers a key to the pool on that lane."""
    Lane.one_sided = property(lambda _lane: True)  # type: ignore[assignment, method-assign]
    allocate = Pool.allocate

    def allocate_with_key(ports: Ports, nbytes: int, scratch_nbytes: int) -> Pool:
        pool = allocate(ports, nbytes, scratch_nbytes)
        length = pool.scratch_address + _round_up(scratch_nbytes) - pool.region.address
        memory = ports[Lane.TCP].context.register(pool.region.address, length)
        pool._adopt(Lane.TCP, memory, memory)
        return pool

    Pool.allocate = staticmethod(allocate_with_key)  # type: ignore[method-assign]


if __name__ == "__main__":
    plant()
    Agent().serve()
