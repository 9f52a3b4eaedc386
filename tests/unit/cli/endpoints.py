"""A small HTTP server that answers with what a test gives it: path -> (status, body) or a list of SSE data."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field


@dataclass
class Endpoint:
    url: str
    answers: dict[str, tuple[int, object]]
    bodies: list[dict[str, object]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)


@contextmanager
def serving(answers: dict[str, tuple[int, object]], tls: ssl.SSLContext | None = None) -> Iterator[Endpoint]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            endpoint.authorizations.append(self.headers["Authorization"])
            status, body = answers.get(self.path, (404, {"error": {"message": "no such path"}}))
            data = "".join(f"data: {event}\n\n" for event in body) if isinstance(body, list) else json.dumps(body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(data.encode())))
            self.end_headers()
            self.wfile.write(data.encode())

        def do_POST(self) -> None:
            endpoint.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.do_GET()

        def handle(self) -> None:
            with suppress(OSError):  # a client that does not trust us hangs up in the handshake
                super().handle()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        endpoint = Endpoint(f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}", answers)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield endpoint
        finally:
            server.shutdown()
            thread.join()
