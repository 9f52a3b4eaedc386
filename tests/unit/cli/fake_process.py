"""Stands in for `pd-serve <role> --config FILE`: answers /ready, ends on SIGTERM. Words in FAKE_PROCESS, `name:what`, change one of them:

exit      ends with code 3 at once, after a last word      never     never becomes ready      stubborn  ignores SIGTERM
"""

from __future__ import annotations

import http.server
import os
import signal
import sys
import time
import tomllib
from pathlib import Path


class Ready(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def main(role: str, flag: str, path: str) -> None:
    assert flag == "--config"
    settings = tomllib.loads(Path(path).read_text())
    name = role if role == "router" else settings["worker"]["id"]
    words = {word.partition(":")[2] for word in os.environ.get("FAKE_PROCESS", "").split() if word.startswith(f"{name}:")}
    order = Path(path).parent / "order"
    if "exit" in words:
        print("the last word of", name, flush=True)
        sys.exit(3)
    if "never" in words:
        Ready.status = 503

    def stop(signum: int, frame: object) -> None:
        with order.open("a") as file:
            file.write(f"{name}\n")
        if "stubborn" not in words:
            os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, lambda *_: os._exit(99))
    print(name, "threads", os.environ.get("OMP_NUM_THREADS"), flush=True)
    port = settings["router" if role == "router" else "worker"]["port"]
    with http.server.HTTPServer(("127.0.0.1", port), Ready) as server:
        server.serve_forever(poll_interval=0.02)
    time.sleep(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
