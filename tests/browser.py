"""A headless Chromium for tests of the live page, driven over its debugging protocol: nothing to install but the browser itself.

PD_SERVE_CHROMIUM names one; otherwise the usual names are looked for. Where there is none, tests that need it are skipped and say so.
Source: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from tests.patience import PATIENCE_S, Waiting

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
VARIABLE = "PD_SERVE_CHROMIUM"
WHY_NOT = f"no Chromium here: install one of {', '.join(NAMES)}, or name it in {VARIABLE}"


def chromium() -> str | None:
    named = os.environ.get(VARIABLE)
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One page. What it logs as an error, or throws, is in `errors`."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._session = ""
        self._ids = itertools.count(1)
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def open(self) -> None:
        target = await self.send("Target.createTarget", url="about:blank")
        attached = await self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            await self.send(f"{domain}.enable")
        await self.send("Emulation.setScrollbarsHidden", hidden=True)

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def send(self, method: str, **params: object) -> dict[str, Any]:
        number = next(self._ids)
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        message: dict[str, object] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        await self._socket.send(json.dumps(message))
        return await asyncio.wait_for(asked, PATIENCE_S)

    async def show(self, url: str, width: int = 1280, height: int = 900) -> None:
        await self.resize(width, height)
        await self.dark(False)
        await self.send("Page.navigate", url=url)

    async def dark(self, is_dark: bool) -> None:
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}])

    async def resize(self, width: int, height: int) -> None:
        await self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    async def refresh(self) -> None:
        """As if it had been looked at again: it asks at once."""
        await self.value("document.dispatchEvent(new Event('visibilitychange'))")

    async def value(self, expression: str) -> Any:
        answer = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 5.0) -> None:
        """It is true. AssertionError with the page's text after that many seconds of waiting (tests/patience.py)."""
        waiting = Waiting(timeout_s, 0.02)
        while not await self.value(f"Boolean({expression})"):
            if waiting.is_over():
                raise AssertionError(
                    f"not in {timeout_s} s: {expression}; errors {self.errors}; {await self.value('document.body.innerText')}"
                )
            await asyncio.sleep(0.02)

    async def picture(self) -> bytes:
        """The whole page as a PNG."""
        answer = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    async def _read(self) -> None:
        async for text in self._socket:
            message = json.loads(text)
            asked = self._asked.pop(message.get("id", 0), None)
            if asked is not None and not asked.done():
                if "error" in message:
                    asked.set_exception(AssertionError(message["error"]))
                else:
                    asked.set_result(message["result"])
            elif message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(message["params"]["exceptionDetails"]))
            elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.errors.append(message["params"]["entry"]["text"])
            elif message.get("method") == "Runtime.consoleAPICalled" and message["params"]["type"] == "error":
                self.errors.append(str(message["params"]["args"]))


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Page]:
    """Precondition: chromium() found one. `folder`: for its profile."""
    program = chromium()
    assert program is not None, WHY_NOT
    options = ["--headless", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", "--remote-debugging-port=0", "--no-proxy-server"]
    if os.getuid() == 0:
        options.append("--no-sandbox")  # root may not use it
    # A session of its own: the browser's helpers outlive it when it alone is ended.
    process = await asyncio.create_subprocess_exec(
        program,
        *options,
        f"--user-data-dir={folder}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        async with connect(await _address(folder, process), max_size=None, proxy=None) as socket:
            page = Page(socket)
            await page.open()
            try:
                yield page
            finally:
                await page.close()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _address(folder: Path, process: asyncio.subprocess.Process) -> str:
    """Of its debugging protocol, which it writes down when it listens."""
    waiting = Waiting(PATIENCE_S, 0.02)
    while True:
        lines = await asyncio.to_thread(_lines, folder / "DevToolsActivePort")
        if len(lines) >= 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        assert process.returncode is None, f"the browser ended with code {process.returncode}"
        assert not waiting.is_over(), "the browser does not listen"
        await asyncio.sleep(0.02)


def _lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []
