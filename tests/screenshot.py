"""The picture in docs/: `python -m tests.screenshot [FOLDER]` a cluster at work, seen through its live page.

Also written are the same page in the dark and 400 pixels wide, for whoever changed it to look at; only ui.png is kept in docs/images.
"""

from __future__ import annotations

import asyncio
import io
import json
import random
import sys
import tempfile
from pathlib import Path

import httpx
from PIL import Image

from pd_serve.bench.handover import text_of
from router.api.ui import UI_PATH
from tests.browser import WHY_NOT, Page, browser, chromium
from tests.cluster import running

PICTURE_WIDTH = 1280
SECONDS = 24
SETTINGS = {"observe.trace_requests": "256", "engine.warm_up_s": "1", "transport.push_bytes": "0"}
"""Each layer is pushed by itself: prompts that a picture can wait for are short."""


async def load(url: str, stop: asyncio.Event) -> None:
    """Some clients whose prompts share a beginning, one after the other each."""
    rng = random.Random(5)
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]

        async def client(number: int) -> None:
            count = 0
            while not stop.is_set():
                count += 1
                words = text_of(rng.choice((24, 60, 200, 420)), (number, count))
                body = {
                    "model": model,
                    "messages": [{"role": "user", "content": f"Go on: {words}"}],
                    "max_tokens": rng.choice((12, 24, 48)),
                }
                (
                    await http.post("/v1/chat/completions", json=body, headers={"x-request-id": f"client-{number}-{count}"})
                ).raise_for_status()
                await asyncio.sleep(rng.random())

        await asyncio.gather(*(client(number) for number in range(4)))


async def look(page: Page, url: str, folder: Path) -> None:
    stop = asyncio.Event()
    working = asyncio.create_task(load(url, stop))
    await page.show(f"{url}{UI_PATH}", PICTURE_WIDTH)
    await asyncio.sleep(SECONDS)
    # The longest prompt that went to two workers: its layers are there to be seen.
    choose = """(() => {
      const rows = [...document.querySelectorAll('[data-request]')].filter((row) => !/in progress|as decode/.test(row.innerText));
      rows.sort((a, b) => b.children[2].innerText - a.children[2].innerText);
      rows[0].querySelector('button').click();
    })()"""
    await page.value(choose)
    await page.until("document.querySelectorAll('[data-layer]').length > 0")
    for name, width, is_dark in (("ui", PICTURE_WIDTH, False), ("ui-dark", PICTURE_WIDTH, True), ("ui-narrow", 400, False)):
        await page.resize(width, 900)
        await page.dark(is_dark)
        await page.until(f"window.innerWidth === {width}")
        await page.value("document.activeElement.blur(), window.scrollTo(0, 0)")
        await page.refresh()
        await asyncio.sleep(0.5)
        # Few colours are on it: a palette makes it half as large.
        picture = Image.open(io.BytesIO(await page.picture())).convert("RGB")
        picture.quantize(128, Image.Quantize.MAXCOVERAGE).save(folder / f"{name}.png", optimize=True)
    stop.set()
    await working
    print(json.dumps({"errors": page.errors}))


async def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary, running(Path(temporary) / "logs", prefill=2, decode=2, settings=SETTINGS) as cluster:
        async with browser(Path(temporary) / "profile") as page:
            await look(page, cluster.url, folder)


if __name__ == "__main__":
    assert chromium() is not None, WHY_NOT
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
    target.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(target))
