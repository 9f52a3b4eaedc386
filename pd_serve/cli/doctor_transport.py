"""`python -m pd_serve.cli.doctor_transport NAME BINDING LANES`: opens a transport as a worker would and prints what it got, as JSON.

A process of its own: a library that is broken may end the process that opens it, and doctor has to live to tell.
"""

from __future__ import annotations

import json
import sys

from pd_serve.errors import PdServeError
from pd_serve.ids import PeerId, WorkerId, new_incarnation
from pd_serve.transport.base import TransportSettings
from pd_serve.transport.nixl.transport import NixlTransport
from pd_serve.transport.ucx.bindings import open_binding
from pd_serve.transport.ucx.transport import UcxTransport

POOL_NBYTES = 1 << 20


def main(name: str, binding: str, lanes: str) -> int:
    try:
        peer = PeerId(WorkerId("doctor"), new_incarnation())
        settings = TransportSettings(self_id=peer, secret=b"", host="127.0.0.1", host_id="doctor", lanes=lanes)
        transport = (
            NixlTransport(settings, lambda event: None)
            if name == "nixl"
            else UcxTransport(settings, lambda event: None, open_binding(binding))
        )
        try:
            transport.allocate_pool(POOL_NBYTES)
            found = {"library": transport.library, "lanes": list(transport.lanes())}
        finally:
            transport.close()
    except PdServeError as error:
        print(json.dumps({"error": error.message}))
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
