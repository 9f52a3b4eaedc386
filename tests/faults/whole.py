"""When nothing is left of a fault: everything that was started is there, ready and joined."""

from __future__ import annotations

import httpx

from tests.cluster import Cluster


def is_whole(cluster: Cluster, must_go: int | None = None) -> bool:
    """All workers that were started are ready, those of different roles have joined, and incarnation `must_go` is not among them."""
    try:
        workers = cluster.workers()
    except httpx.HTTPError:
        return False
    if len(workers) != cluster.prefill + cluster.decode + cluster.colocated or not all(worker["ready"] for worker in workers):
        return False
    if any(worker["incarnation"] == must_go for worker in workers):
        return False
    names = {f"{worker['id']}@{worker['incarnation']:016x}": worker["role"] for worker in workers}
    for worker in workers:
        joined = {peer["peer"] for peer in worker["peers"] if peer["joined"]}
        if not {name for name, role in names.items() if role != worker["role"]} <= joined:
            return False
    return True
