"""pd-serve workers, over a router with mock workers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from pd_serve.cli.app import run
from pd_serve.config import SecurityConfig
from pd_serve.protocol.link import Role
from tests.fakes_worker import mock_worker, running
from tests.unit.router.cluster import Cluster, cluster


async def said(c: Cluster, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, standard output and errors of one command."""
    secret = ("--set", "security.cluster_secret=hush")
    code = await asyncio.to_thread(run, ["workers", *words, "--router", c.url, *secret])
    told = capsys.readouterr()
    return code, told.out, told.err


async def test_a_worker_is_added_shown_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    staying, coming = mock_worker("a", Role.BOTH), mock_worker("b", Role.BOTH)
    security = SecurityConfig(cluster_secret="hush")
    async with cluster(tmp_path, staying, security=security) as c, running(coming) as address:
        assert await said(c, capsys, "add", address) == (0, f"{address}: linked\n", "")
        code, out, _ = await said(c, capsys, "list")
        assert (code, address in out, "both" in out) == (0, True, True)
        code, out, _ = await said(c, capsys, "remove", "b", "--json")
        assert (code, json.loads(out)["status"]["id"]) == (0, "b")
        code, out, _ = await said(c, capsys, "list", "--json")
        assert ([worker["status"]["id"] for worker in json.loads(out)["workers"]], json.loads(out)["removed"]) == (["a"], ["b"])


async def test_what_goes_wrong_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with cluster(tmp_path, mock_worker("a", Role.BOTH), security=SecurityConfig(cluster_secret="hush")) as c:
        code, _, err = await said(c, capsys, "add", "http://127.0.0.1:9", "--wait", "0.1")
        assert (code, err) == (1, "")
        code, _, err = await said(c, capsys, "role", "nobody", "prefill")
        assert (code, err.count("\n"), "there is no worker 'nobody'" in err) == (1, 1, True)
        code, _, err = await said(c, capsys, "add", "gopher://x")
        assert (code, err.count("\n")) == (1, 1)
        code, _, err = await said(c, capsys, "role", "a", "judge")
        assert (code, "pd-serve workers role --help" in err) == (2, True)
