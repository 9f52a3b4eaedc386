"""The least that forwards in Python, to measure the router against: FastAPI in front, aiohttp behind.

pd-serve bench router --peer "bare=python -m tests.bench.bare_proxy {port} {upstream}"
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse


def bare_proxy(upstream: str) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            app.state.session = session
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await request.json()
        answer = await app.state.session.post(f"{upstream}/v1/completions", json=body)
        if not body.get("stream"):
            async with answer:
                return Response(await answer.read(), answer.status, media_type="application/json")

        async def parts() -> AsyncIterator[bytes]:
            async with answer:
                async for part in answer.content.iter_any():
                    yield part

        return StreamingResponse(parts(), answer.status, media_type="text/event-stream")

    return app


if __name__ == "__main__":
    uvicorn.run(bare_proxy(sys.argv[2]), port=int(sys.argv[1]), loop="uvloop", http="httptools", access_log=False, log_level="warning")
