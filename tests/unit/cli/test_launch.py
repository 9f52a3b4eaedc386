"""The launcher with stand-in processes: order, deaths, restarts, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from pd_serve.cli.launch import Launcher, LaunchError
from pd_serve.cli.launch_child import Child
from pd_serve.cli.launch_plan import Machine, plan_launch
from pd_serve.config_sources import Sources
from tests.patience import PATIENCE_S, Waiting
from tests.pids import is_running
from tests.ports import free_ports

FAKE = (sys.executable, str(Path(__file__).with_name("fake_process.py")))


@dataclass
class RecordingView:
    events: list[tuple[str, ...]] = field(default_factory=list)
    is_ready: asyncio.Event = field(default_factory=asyncio.Event)
    missing: list[str] = field(default_factory=list)

    def waiting(self, missing: Sequence[str]) -> None:
        self.missing = list(missing)

    def ready(self, children: Sequence[Child]) -> None:
        self.events.append(("ready",))
        self.is_ready.set()

    def died(self, child: Child, how: str, restart_in_s: float | None) -> None:
        self.events.append(("died", child.plan.name, how, *child.last_lines(1)))

    def restarted(self, child: Child) -> None:
        self.events.append(("restarted", child.plan.name))

    def stopping(self, names: Sequence[str]) -> None:
        self.events.append(("stopping", *names))

    def note(self, text: str) -> None:
        self.events.append(("note", text))


@dataclass
class Run:
    launcher: Launcher
    view: RecordingView
    task: asyncio.Task[int]

    def child(self, name: str) -> Child:
        return next(child for child in self.launcher.children if child.plan.name == name)

    async def until(self, event: tuple[str, ...]) -> None:
        await until(lambda: any(seen[: len(event)] == event for seen in self.view.events), str(event))


async def until(look: Callable[[], bool], what: str) -> None:
    waiting = Waiting(PATIENCE_S, 0.01)
    while not look():
        assert not waiting.is_over(), what
        await asyncio.sleep(0.01)


def ports() -> tuple[str, ...]:
    """Settings that give every process a port which nobody takes before it listens."""
    first = free_ports(4)[0]
    return f"router.port={first}", f"prefill.worker.port={first + 1}", f"decode.worker.port={first + 2}"


@asynccontextmanager
async def launched(tmp_path: Path, *sets: str, words: str = "", monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    monkeypatch.setenv("FAKE_PROCESS", words)
    sources = Sources(sets=("worker.drain_deadline_s=0.5", *ports(), *sets))
    plan = plan_launch(sources, Machine(2, ()), lambda model_id, cache_dir: tmp_path)
    workers = tuple(replace(worker, program=FAKE) for worker in plan.workers)
    plan = replace(plan, router=replace(plan.router, program=FAKE), workers=workers)
    view = RecordingView()
    launcher = Launcher(plan, tmp_path, view)
    run = Run(launcher, view, asyncio.create_task(launcher.run()))
    try:
        yield run
    finally:
        run.task.cancel()
        with suppress(asyncio.CancelledError, LaunchError):
            await run.task
        assert not [child.pid for child in launcher.children if child.pid and is_running(child.pid)]


async def test_one_signal_stops_the_router_first_and_exits_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with launched(tmp_path, "launch.decode=2", monkeypatch=monkeypatch) as run:
        await asyncio.wait_for(run.view.is_ready.wait(), PATIENCE_S)
        os.kill(os.getpid(), signal.SIGINT)
        assert await asyncio.wait_for(run.task, PATIENCE_S) == 0
    order = (tmp_path / "order").read_text().split()
    assert order[0] == "router"
    assert sorted(order[1:]) == ["decode-0", "decode-1", "prefill-0"]
    assert run.view.events == [("ready",), ("stopping", "router"), ("stopping", "prefill-0", "decode-0", "decode-1")]
    assert "threads 1" in (tmp_path / "decode-1.log").read_text()


async def test_settings_of_children_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with launched(tmp_path, monkeypatch=monkeypatch) as run:
        await asyncio.wait_for(run.view.is_ready.wait(), PATIENCE_S)
        for child in run.launcher.children:
            assert stat.S_IMODE(os.stat(child.settings).st_mode) == 0o600


async def test_child_that_fails_at_the_start_ends_the_launch_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with launched(tmp_path, words="decode-0:exit", monkeypatch=monkeypatch) as run:
        with pytest.raises(LaunchError, match="decode-0 ended before everything was ready"):
            await asyncio.wait_for(run.task, PATIENCE_S)
        assert ("died", "decode-0", "exit code 3", "the last word of decode-0") in run.view.events


async def test_not_ready_in_time_names_who(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with launched(tmp_path, "launch.ready_timeout_s=1", words="prefill-0:never", monkeypatch=monkeypatch) as run:
        with pytest.raises(LaunchError) as late:
            await asyncio.wait_for(run.task, PATIENCE_S)
        told, _, names = late.value.message.partition(" (logs")[0].partition(": ")
        assert told == "not ready within 1 s"
        assert {"prefill-0"} <= set(names.split(", ")) <= set(run.view.missing), "who is not there yet, and nobody else"


async def test_death_of_one_worker_leaves_the_rest_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with launched(tmp_path, monkeypatch=monkeypatch) as run:
        await asyncio.wait_for(run.view.is_ready.wait(), PATIENCE_S)
        os.kill(run.child("prefill-0").pid, signal.SIGKILL)
        await run.until(("died", "prefill-0", "killed by SIGKILL"))
        assert run.child("decode-0").running
        assert not run.task.done()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(run.task, PATIENCE_S) == 0


@pytest.mark.parametrize(("victim", "words"), [("decode-0", "can decode"), ("router", "the router is gone")])
async def test_when_nothing_can_serve_everything_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, words: str) -> None:
    async with launched(tmp_path, monkeypatch=monkeypatch) as run:
        await asyncio.wait_for(run.view.is_ready.wait(), PATIENCE_S)
        os.kill(run.child(victim).pid, signal.SIGKILL)
        with pytest.raises(LaunchError, match=words):
            await asyncio.wait_for(run.task, PATIENCE_S)


async def test_restart_starts_a_dead_process_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with launched(tmp_path, "launch.restart=true", monkeypatch=monkeypatch) as run:
        await asyncio.wait_for(run.view.is_ready.wait(), PATIENCE_S)
        for victim in ("decode-0", "router"):
            old = run.child(victim).pid
            os.kill(old, signal.SIGKILL)
            await run.until(("restarted", victim))
            assert run.child(victim).pid != old
        assert [run.child("decode-0").next_backoff_s() for _ in range(3)] == [1.0, 2.0, 4.0]


async def test_drained_process_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with launched(tmp_path, "launch.restart=true", monkeypatch=monkeypatch) as run:
        await asyncio.wait_for(run.view.is_ready.wait(), PATIENCE_S)
        os.kill(run.child("prefill-0").pid, signal.SIGTERM)
        await run.until(("note", "prefill-0 has drained and ended"))
        await asyncio.sleep(0.7)
        assert not run.child("prefill-0").running


async def test_second_signal_kills_what_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with launched(tmp_path, "worker.drain_deadline_s=60", words="router:stubborn decode-0:stubborn", monkeypatch=monkeypatch) as run:
        await asyncio.wait_for(run.view.is_ready.wait(), PATIENCE_S)
        os.kill(os.getpid(), signal.SIGINT)
        await run.until(("stopping", "router"))
        os.kill(os.getpid(), signal.SIGINT)
        assert await asyncio.wait_for(run.task, PATIENCE_S) == 1
        assert ("died", "decode-0", "killed by SIGKILL", "decode-0 threads 1") in run.view.events


async def test_children_end_with_a_launcher_that_was_killed(tmp_path: Path) -> None:
    """In a process of its own, since this one may not be killed."""
    script = (
        "import asyncio, os, signal, sys; from tests.unit.cli.test_launch import *;"
        "plan = plan_launch(Sources(sets=ports()), Machine(2, ()), lambda *_: Path('/'));"
        "plan = replace(plan, router=replace(plan.router, program=FAKE), workers=tuple(replace(w, program=FAKE) for w in plan.workers));"
        "view = RecordingView(); launcher = Launcher(plan, Path(sys.argv[1]), view);"
        "view.ready = lambda children: (print(*(c.pid for c in children), flush=True), os.kill(os.getpid(), signal.SIGKILL));"
        "asyncio.run(launcher.run())"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(tmp_path), stdout=asyncio.subprocess.PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    pids = [int(word) for word in out.split()]
    assert len(pids) == 3
    await until(lambda: not any(map(is_running, pids)), "all have ended")
