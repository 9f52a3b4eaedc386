"""What travels through the router in PeerInfo.transport_metadata: how to reach a transport. No secret and no key of its memory."""

from __future__ import annotations

import hmac

import msgspec

from pd_serve.errors import IncompatibleError, ProtocolError
from pd_serve.ids import PeerId
from pd_serve.transport.ucx.lanes import Lane
from pd_serve.transport.ucx.messages import DIGEST_NBYTES, keyed_digest
from pd_serve.transport.ucx.process import ProcessIdentity
from pd_serve.wire import Codec

MAX_METADATA_NBYTES = 64 * 1024


class LaneAddress(msgspec.Struct, frozen=True, array_like=True):
    lane: Lane
    worker_address: bytes


class UcxMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Signed with the cluster's secret: UCX ends the process that connects to an address it cannot read."""

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
    shm_voice: bytes = b""
    """Worker address for messages of peers that write over shared memory."""

    def voice_on(self, lane: Lane) -> bytes:
        """Where messages go to when bytes go over the lane. Raises ProtocolError when the peer does not offer it."""
        return self.shm_voice if lane is Lane.SHM else self.address_on(lane)

    def address_on(self, lane: Lane) -> bytes:
        """Raises ProtocolError when the peer does not offer the lane."""
        for entry in self.lanes:
            if entry.lane is lane:
                return entry.worker_address
        raise ProtocolError(f"{self.peer} offers no {lane.value} lane")


class MetadataCodec:
    """digest (32 bytes) + msgpack. A digest of another secret or of other bytes is an IncompatibleError."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._codec: Codec[UcxMetadata] = Codec(UcxMetadata, MAX_METADATA_NBYTES)

    def encode(self, metadata: UcxMetadata) -> bytes:
        payload = self._codec.encode(metadata)
        return keyed_digest(self._secret, b"metadata", payload) + payload

    def decode(self, data: bytes) -> UcxMetadata:
        """Raises ProtocolError."""
        digest, payload = data[:DIGEST_NBYTES], data[DIGEST_NBYTES:]
        if not hmac.compare_digest(digest, keyed_digest(self._secret, b"metadata", payload)):
            raise IncompatibleError("its digest is wrong: is the cluster secret the same on both?")
        return self._codec.decode(payload)
