"""Runs the processes of a LaunchPlan: starts them, waits until they are ready, watches them, stops them in order.

Order of the end: the router first (it finishes what clients are waiting for, and for that it needs the workers), then all workers together,
each of which drains. Whatever has not ended by its deadline is killed, and a second signal kills everything at once.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx

from pd_serve.cli.launch_child import Child, describe_exit
from pd_serve.cli.launch_plan import ROUTER, LaunchPlan
from pd_serve.errors import PdServeError
from pd_serve.tls import client_tls, tls_trouble

STOP_MARGIN_S = 10.0
"""Beyond a process's own drain deadline."""
FAILED_STOP_S = 3.0
"""When nothing can serve, there is nothing to wait for."""
READY_INTERVAL_S = 0.1


class LaunchError(PdServeError):
    """The processes did not come up, or none is left that can serve."""

    code = "launch_failed"


class LaunchView(Protocol):
    """What the launcher tells whoever is watching."""

    def waiting(self, missing: Sequence[str]) -> None:
        """Names of the processes that are not ready yet."""
        ...

    def ready(self, children: Sequence[Child]) -> None: ...

    def died(self, child: Child, how: str, restart_in_s: float | None) -> None: ...

    def restarted(self, child: Child) -> None: ...

    def stopping(self, names: Sequence[str]) -> None: ...

    def note(self, text: str) -> None: ...


class Launcher:
    """One run of `pd-serve up`."""

    def __init__(self, plan: LaunchPlan, run_dir: Path, view: LaunchView) -> None:
        self._view = view
        self._launch = plan.config.launch
        self._tls = client_tls(plan.config.security)
        self._drain_s = plan.config.worker.drain_deadline_s
        self._router = Child(plan.router, run_dir)
        self._workers = tuple(Child(worker, run_dir) for worker in plan.workers)
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()

    @property
    def children(self) -> tuple[Child, ...]:
        return (self._router, *self._workers)

    async def run(self) -> int:
        """Until a signal, or until nothing can serve any more; the exit code. Raises LaunchError. No child is left behind."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, self._on_signal)
        try:
            return await self._run()
        finally:
            for child in self.children:
                child.kill()
            await asyncio.gather(*(child.exited() for child in self.children if child.running))

    async def _run(self) -> int:
        for child in self.children:
            await child.start()
        watchers = [asyncio.create_task(self._watch(child), name=child.plan.name) for child in self.children]
        stop = asyncio.create_task(self._stop.wait())
        steps = asyncio.create_task(self._until_useless(watchers))
        try:
            await asyncio.wait({stop, steps}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*watchers, stop, steps):
                task.cancel()
            results = await asyncio.gather(*watchers, steps, return_exceptions=True)
        failure = next((result for result in results if isinstance(result, Exception)), None)
        clean = await self._stop_all(self._drain_s + STOP_MARGIN_S if failure is None else FAILED_STOP_S)
        if failure is not None:
            raise failure
        return 0 if clean else 1

    async def _until_useless(self, watchers: Sequence[asyncio.Task[None]]) -> None:
        """Ready, then on, until nothing is left that can serve. Raises LaunchError."""
        ready = asyncio.create_task(self._until_ready())
        try:
            await asyncio.wait({ready, *watchers}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                child = next(child for child, watcher in zip(self.children, watchers, strict=True) if watcher.done())
                raise LaunchError(f"{child.plan.name} ended before everything was ready (log: {child.log})")
            ready.result()
        finally:
            ready.cancel()
        self._view.ready(self.children)
        left = dict(zip(watchers, self.children, strict=True))
        while True:
            done, _ = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for watcher in done:
                del left[watcher]
            roles = {child.plan.role for child in left.values()}
            if ROUTER not in roles:
                raise LaunchError("the router is gone: nothing can serve")
            if not roles & {"decode", "colocated"}:
                raise LaunchError("no worker is left that can decode: nothing can serve")

    async def _until_ready(self) -> None:
        """Raises LaunchError after launch.ready_timeout_s, and at once for a certificate that is not trusted."""
        missing = list(self.children)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._launch.ready_timeout_s
        async with httpx.AsyncClient(timeout=2.0, trust_env=False, verify=self._tls) as client:
            while missing:
                self._view.waiting([child.plan.name for child in missing])
                missing = [child for child in missing if not await _answers_ready(client, child.plan.address)]
                if not missing:
                    return
                if loop.time() > deadline:
                    names = ", ".join(child.plan.name for child in missing)
                    raise LaunchError(f"not ready within {self._launch.ready_timeout_s:g} s: {names} (logs: {missing[0].log.parent})")
                await asyncio.sleep(READY_INTERVAL_S)

    async def _watch(self, child: Child) -> None:
        """Returns when the child has ended and is not to be started again."""
        while True:
            code = await child.exited()
            if code == 0:
                self._view.note(f"{child.plan.name} has drained and ended")
                return
            backoff_s = child.next_backoff_s() if self._launch.restart else None
            self._view.died(child, describe_exit(code), backoff_s)
            if backoff_s is None:
                return
            await asyncio.sleep(backoff_s)
            await child.start()
            self._view.restarted(child)

    async def _stop_all(self, patience_s: float) -> bool:
        """Each stage has `patience_s`. True when every child that still ran ended by itself with code 0."""
        clean = True
        for stage in ((self._router,), self._workers):
            running = [child for child in stage if child.running]
            if not running:
                continue
            self._view.stopping([child.plan.name for child in running])
            for child in running:
                child.terminate()
            exits = asyncio.gather(*(child.exited() for child in running))
            killed = asyncio.create_task(self._kill.wait())
            ends: set[asyncio.Future[Any]] = {exits, killed}
            await asyncio.wait(ends, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            killed.cancel()
            for child in running:
                if child.running:
                    self._view.note(f"{child.plan.name} did not end in time: killed")
                    child.kill()
            for child, code in zip(running, await exits, strict=True):
                if code != 0:
                    clean = False
                    self._view.died(child, describe_exit(code), None)
        return clean

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._kill.set()
        self._stop.set()


async def _answers_ready(client: httpx.AsyncClient, address: str) -> bool:
    """Raises LaunchError when it will never be heard."""
    try:
        return (await client.get(f"{address}/ready")).status_code == httpx.codes.OK
    except httpx.HTTPError as error:
        if trouble := tls_trouble(error):
            raise LaunchError(f"{address} cannot be asked: {trouble}") from error
        return False
