"""Words of the admin API on the router (JSON, under the cluster's secret): who belongs to the fleet, and in which role.

GET    /admin/workers               -> Fleet
POST   /admin/workers               AddWorker    -> FleetAddress
DELETE /admin/workers/{id}          ?force       -> FleetWorker, as it is while it leaves
POST   /admin/workers/{id}/drain    DrainRequest -> FleetWorker
POST   /admin/workers/{id}/role     RoleRequest  -> RoleSwitched
"""

from __future__ import annotations

from pydantic import Field, field_validator

from pd_serve.addresses import split_address
from pd_serve.errors import ProtocolError
from pd_serve.protocol.control import ControlModel, WorkerStatus
from pd_serve.protocol.link import Role

ADMIN_WORKERS_PATH = "/admin/workers"


class AddWorker(ControlModel):
    address: str = Field(description="http(s)://host:port of a worker's front", max_length=256)

    @field_validator("address")
    @classmethod
    def _is_address(cls, value: str) -> str:
        try:
            split_address(value)
        except ProtocolError as error:
            raise ValueError(error.message) from None
        return value.rstrip("/")


class FleetWorker(ControlModel):
    """A linked worker, as the router that was asked sees it."""

    status: WorkerStatus
    leaving: bool = Field(description="it was removed: nothing new is sent there, and it is let go of when what runs there has ended")


class FleetAddress(ControlModel):
    """A place where a worker should be, and from which none is in use."""

    address: str
    worker: str | None = Field(description="id of the worker that is, or was, there; null: none has answered yet")
    configured: bool = Field(description="from the settings or added by an operator: tried for ever. Others are forgotten in time")
    detail: str = Field(description="why there is no link; empty: it is being made")


class Fleet(ControlModel):
    workers: tuple[FleetWorker, ...]
    unlinked: tuple[FleetAddress, ...]
    removed: tuple[str, ...] = Field(description="workers that were removed and not added again: they may register, and are not linked")


class RoleSwitched(ControlModel):
    worker: FleetWorker
    previous: Role
    seconds: float = Field(description="from the request to the worker's word that it works in the new role")
