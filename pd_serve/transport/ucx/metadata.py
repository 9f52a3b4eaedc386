"""What travels through the router in PeerInfo.transport_metadata: how to reach a transport. No secret and no key of its memory."""

from __future__ import annotations

import msgspec

from pd_serve.errors import ProtocolError
from pd_serve.ids import PeerId
from pd_serve.transport.ucx.lanes import Lane
from pd_serve.transport.ucx.process import ProcessIdentity
from pd_serve.wire import Codec

MAX_METADATA_NBYTES = 64 * 1024


class LaneAddress(msgspec.Struct, frozen=True, array_like=True):
    lane: Lane
    worker_address: bytes


class UcxMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Not authenticated: everything that matters is said again in the signed hello and answer."""

    peer: PeerId
    wire_version: int
    ucx_version: str
    messaging: str
    """`am` or `tag`, as in Binding."""
    host: str
    """Address or name that network lanes listen on, for people."""
    host_id: str
    process: ProcessIdentity
    lanes: tuple[LaneAddress, ...]

    def address_on(self, lane: Lane) -> bytes:
        """Raises ProtocolError when the peer does not offer the lane."""
        for entry in self.lanes:
            if entry.lane is lane:
                return entry.worker_address
        raise ProtocolError(f"{self.peer} offers no {lane.value} lane")


def metadata_codec() -> Codec[UcxMetadata]:
    return Codec(UcxMetadata, MAX_METADATA_NBYTES)
