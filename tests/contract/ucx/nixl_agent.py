"""The agent over NIXL."""

from __future__ import annotations

import tests.contract.ucx.agent as ucx_agent
from pd_serve.transport.nixl.transport import NixlTransport

if __name__ == "__main__":
    ucx_agent.UcxTransport = NixlTransport  # type: ignore[misc]
    ucx_agent.Agent().serve()
