"""The rank's end of the Unix socket to its front."""

from __future__ import annotations

import socket

from pd_serve.protocol.link import FrontFrame, RankFrame, front_codec, rank_codec
from workers.frame_socket import FrameSocket


class FrontSocket(FrameSocket[FrontFrame, RankFrame]):
    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected, front_codec().decode, rank_codec().encode, "the front")

    @staticmethod
    def connect(path: str) -> FrontSocket:
        """Raises OSError when nobody listens."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            raise
        return FrontSocket(connection)
