"""The live page: its files and headers, and the page itself in a headless Chromium where there is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pd_serve.config import SecurityConfig
from pd_serve.protocol.link import Role
from router.api.ui import UI_PATH
from tests.browser import WHY_NOT, browser, chromium
from tests.fakes_traces import NUM_LAYERS, told_by
from tests.fakes_worker import Board, MockWorker, mock_worker
from tests.unit.router.cluster import Cluster, cluster, completion_body, until

UI = Path(__file__).resolve().parents[3] / "router/ui"
HOSTILE = "<img/src=x/onerror=document.title='hacked'>"
needs_browser = pytest.mark.skipif(chromium() is None, reason=WHY_NOT)


def pair() -> tuple[MockWorker, MockWorker]:
    board = Board()
    workers = mock_worker("prefill-0", Role.PREFILL, board=board), mock_worker("decode-0", Role.DECODE, board=board)
    for worker in workers:
        worker.traces = told_by
    return workers


# ---- files


async def test_every_file_is_served_under_a_strict_policy_and_known_again_by_its_tag(tmp_path: Path) -> None:
    async with cluster(tmp_path, wait_ready=False, security=SecurityConfig(cluster_secret="s", api_keys=("k",))) as c:
        for name in ("", "/", *(f"/{path.name}" for path in UI.iterdir())):
            answer = await c.http.get(UI_PATH + name)
            assert answer.status_code == 200, name
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = await c.http.get(UI_PATH + name, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert (await c.http.get(f"{UI_PATH}/nothing.js")).status_code == 404
        assert UI_PATH not in str((await c.http.get("/openapi.json")).json()["paths"].keys())


def test_nothing_is_inline_parsed_as_html_or_from_elsewhere() -> None:
    page = (UI / "index.html").read_text()
    assert not re.findall(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=", page)
    assert set(re.findall(r'(?:src|href)="([^"d][^"]*)"', page)) == {"/ui/style.css", "/ui/app.js"}
    for path in UI.glob("*.js"):
        text = path.read_text()
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|cssText", text), path.name
        assert set(re.findall(r"https?://[^\"\s]+", text)) <= {"http://www.w3.org/2000/svg"}, path.name
        for imported in re.findall(r'from "([^"]+)"', text):
            assert (UI / imported).is_file(), imported


def test_the_files_are_packaged() -> None:
    packaged = (UI.parents[1] / "pyproject.toml").read_text()
    for suffix in {path.suffix for path in UI.iterdir()}:
        assert f'"ui/*{suffix}"' in packaged


# ---- the page


async def requested(c: Cluster) -> None:
    """One request whose client gave a name that would be a tag."""
    body = completion_body(max_tokens=6, ignore_eos=True)
    answer = await c.http.post("/v1/completions", json=body, headers={"x-request-id": HOSTILE})
    assert answer.status_code == 200


@needs_browser
async def test_the_page_shows_workers_requests_and_a_waterfall_with_layers(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with cluster(tmp_path, prefill, decode) as c, browser(tmp_path / "profile") as page:
        await page.show(f"{c.url}{UI_PATH}")
        await page.until("document.querySelectorAll('[data-worker]').length === 2")
        assert "No request has come yet" in await page.value("document.getElementById('requests').innerText")
        await requested(c)
        await page.refresh()
        await page.until("document.querySelector('[data-request] button')")
        workers = await page.value("[...document.querySelectorAll('[data-worker]')].map((card) => card.dataset.worker)")
        assert sorted(workers) == ["decode-0", "prefill-0"]
        assert await page.value("document.querySelectorAll('svg .lane').length") == 1
        assert await page.value("document.querySelectorAll('[data-histogram]').length") == 4
        await page.value("document.querySelector('[data-request] button').click()")
        await page.until("document.querySelectorAll('[data-layer]').length > 0")
        layers = await page.value("[...new Set([...document.querySelectorAll('[data-layer]')].map((bar) => bar.dataset.layer))].length")
        assert layers == NUM_LAYERS
        names = await page.value("[...document.querySelectorAll('[data-span]')].map((row) => row.dataset.span)")
        assert {"queue", "reserve", "compute", "push", "first step"} <= set(names)
        assert HOSTILE in await page.value("document.getElementById('waterfall').innerText")
        assert await page.value("document.querySelectorAll('img').length") == 0
        for width in (1280, 400):
            await page.resize(width, 900)
            await page.until(f"window.innerWidth === {width} && document.documentElement.scrollWidth <= {width}")
        assert page.errors == []

        prefill.cut()
        prefill.info = mock_worker("prefill-1", Role.PREFILL).info  # another answers at its address, and is refused
        await until(lambda: len(c.services.pool.workers) == 1, "its link is gone")
        await page.refresh()
        await page.until("document.querySelector('[data-worker=prefill-0].lost')")
        assert page.errors == []


@needs_browser
async def test_the_page_asks_for_the_key_and_says_when_the_router_is_gone(tmp_path: Path) -> None:
    async with browser(tmp_path / "profile") as page:
        async with cluster(tmp_path, *pair(), security=SecurityConfig(cluster_secret="hush")) as c:
            await requested(c)
            await page.show(f"{c.url}{UI_PATH}")
            await page.until("document.getElementById('key-form')?.hidden === false")
            for key in ("wrong", "hush"):
                await page.value(f"document.getElementById('key').value = {key!r}, document.querySelector('#key-form button').click()")
                await page.until("document.getElementById('state').textContent.includes(%r)" % ("not take" if key == "wrong" else "ready"))
            await page.until("document.querySelectorAll('[data-worker]').length === 2")
            assert await page.value("document.getElementById('key-form').hidden")
            assert await page.value("sessionStorage.length === 1 && localStorage.length === 0 && document.cookie === ''")
        await page.refresh()
        await page.until("!document.getElementById('trouble').hidden")
        assert "asking again in" in await page.value("document.getElementById('trouble').innerText")
        assert await page.value("document.querySelectorAll('[data-worker]').length") == 2, "what was known stays, and is said to be old"
