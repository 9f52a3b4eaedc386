"""A rank without an engine: speaks the front's socket as workers.rank does, driven by words in the FAKE_RANK environment variable.

(nothing)     ready at once, reports, answers Open with one token, obeys Drain and Stop
exit          says Fatal and exits 3 before it connects anything
silent        ready, one report, then no more (a frozen engine)
busy          never idle: a drain has to wait for its deadline
deaf          ignores Stop
garbage       sends bytes that are no frame once ready
flood         sends frames to every link as fast as the socket takes them
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import struct
import sys
import time

from pd_serve.ids import AttemptId
from pd_serve.kv.layout import KVDtype, KVLayout
from pd_serve.protocol.link import (
    BlockCounts,
    Drain,
    Fatal,
    FinishReason,
    FromRouter,
    GetTrace,
    LinkDown,
    LinkUp,
    Load,
    Open,
    PeerInfo,
    PeerState,
    Ping,
    Pong,
    RankFrame,
    RankReady,
    Report,
    Sample,
    SetRole,
    Step,
    Stop,
    TokenOutput,
    ToRouter,
    Welcome,
    front_codec,
    rank_codec,
)
from pd_serve.protocol.traces import LayerTrace, Trace, Traces
from pd_serve.wire import PROTOCOL_VERSION
from workers.rank_spec import RankSpec

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, num_blocks=32, dtype=KVDtype.FLOAT32)


def main(spec_path: str) -> None:
    from pathlib import Path

    modes = set(os.environ.get("FAKE_RANK", "").split())
    spec = RankSpec.read(Path(spec_path))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(spec.socket_path)
    encode, decode = rank_codec().encode, front_codec().decode

    def send(frame: RankFrame) -> None:
        payload = encode(frame)
        connection.sendall(struct.pack("<I", len(payload)) + payload)

    if "exit" in modes:
        send(Fatal("no model at this address"))
        sys.exit(3)
    if "slow" in modes:
        time.sleep(60)
    info = PeerInfo(spec.peer, spec.role, PROTOCOL_VERSION, "fake", LAYOUT, "loopback", (b"",))
    send(RankReady(Welcome(info, "fake-model", 128, 100, (0,), os.getppid(), (os.getpid(),))))
    seen_path = os.environ.get("FAKE_RANK_SEEN")
    role, draining, seq = spec.role, False, 0
    links: set[int] = set()
    buffer = bytearray()
    selector = selectors.DefaultSelector()
    selector.register(connection, selectors.EVENT_READ)
    next_report = 0.0
    while True:
        if time.monotonic() >= next_report and not ("silent" in modes and seq > 0):
            next_report = time.monotonic() + spec.config.worker.report_interval_s
            seq += 1
            load = Load(seq, role, draining, BlockCounts(32, 20, 4, 2, 1), 1, 3, 2, 17, 40)
            peer = PeerState(spec.peer, True, "posix", True, 1e9, "")
            samples = (
                Sample("pd_serve_kv_transfer_bytes_total", 10.0, "posix"),
                Sample("pd_serve_handover_seconds", 0.01),
                Sample("nonsense", 1.0),
            )
            send(Report(load, (peer,), (("granted", 1),), samples, "busy" not in modes))
            if "garbage" in modes:
                connection.sendall(struct.pack("<I", 3) + b"\xff\xff\xff")
        if "flood" in modes:
            for link in links:
                outputs = tuple(TokenOutput(number, 1) for number in range(10_000))
                send(ToRouter(link, Step(outputs)))
        if not selector.select(0 if "flood" in modes and links else max(0.0, next_report - time.monotonic())):
            continue
        data = connection.recv(1 << 20)
        if not data:
            return
        buffer += data
        while len(buffer) >= 4 and len(buffer) >= 4 + (nbytes := struct.unpack_from("<I", buffer)[0]):
            frame = decode(bytes(buffer[4 : 4 + nbytes]))
            del buffer[: 4 + nbytes]
            if seen_path:
                with open(seen_path, "a") as file:
                    file.write(json.dumps([type(frame).__name__, repr(frame)]) + "\n")
            match frame:
                case LinkUp(link_id):
                    links.add(link_id)
                case LinkDown(link_id):
                    links.discard(link_id)
                case FromRouter(link_id, Ping(nonce)):
                    send(ToRouter(link_id, Pong(nonce)))
                case FromRouter(link_id, Open() as opened):
                    send(ToRouter(link_id, Step((TokenOutput(opened.attempt_id, opened.token_ids[0] + 1, FinishReason.LENGTH),))))
                case SetRole(new_role):
                    role = new_role
                    next_report = 0.0
                case Drain():
                    draining = True
                    next_report = 0.0
                case GetTrace():
                    send(Traces((Trace(AttemptId(9), 16, 0.5, 0.6, "posix", 0.75, (LayerTrace(0, 1, 0.1, 0.2, 0.3, 64),)),)))
                case Stop() if "deaf" not in modes:
                    return


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(sys.argv[1])
