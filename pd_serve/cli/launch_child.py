"""One process that the launcher started: its log, its end, its next start. Owned by the launcher's event loop.

Children get a session of their own, so that a Ctrl-C in the terminal reaches the launcher alone and the order of stopping is the
launcher's; the kernel sends them SIGTERM should the launcher die (child_process.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from functools import partial
from pathlib import Path

from pd_serve.child_process import die_with_parent
from pd_serve.cli.launch_plan import ProcessPlan, child_env
from pd_serve.config_sources import settings_toml

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
STEADY_AFTER_S = 60.0
"""A child that lived this long starts its back-off anew."""


class Child:
    """start -> (exited -> start ...) -> terminate or kill -> exited. Writes `<name>.toml` and `<name>.log` in the run folder."""

    def __init__(self, plan: ProcessPlan, run_dir: Path) -> None:
        self.plan = plan
        self.log = run_dir / f"{plan.name}.log"
        self.settings = run_dir / f"{plan.name}.toml"
        self._process: asyncio.subprocess.Process | None = None
        self._backoff_s = FIRST_BACKOFF_S
        self._started_at = 0.0

    @property
    def pid(self) -> int:
        """Of the last start; 0 before the first."""
        return self._process.pid if self._process else 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def command(self) -> tuple[str, ...]:
        return (*self.plan.program, self.plan.role, "--config", str(self.settings))

    async def start(self) -> None:
        """The log is appended to: a restart does not hide why it was needed."""
        self._write_settings()
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.command,
                env=child_env(os.environ, self.plan.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )
        self._started_at = asyncio.get_running_loop().time()

    async def exited(self) -> int:
        """The exit code, negative for a signal, once the process has ended."""
        assert self._process is not None
        return await self._process.wait()

    def terminate(self) -> None:
        """Ask it to finish what it runs and to end. Idempotent."""
        if self._process is not None and self.running:
            self._process.terminate()

    def kill(self) -> None:
        if self._process is not None and self.running:
            self._process.kill()

    def next_backoff_s(self) -> float:
        """How long to wait before the next start; doubles with each call, up to a limit."""
        if asyncio.get_running_loop().time() - self._started_at > STEADY_AFTER_S:
            self._backoff_s = FIRST_BACKOFF_S
        wait_s = self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, LONGEST_BACKOFF_S)
        return wait_s

    def last_lines(self, count: int = 12) -> tuple[str, ...]:
        try:
            with self.log.open(errors="replace") as file:
                return tuple(line.rstrip("\n") for line in deque(file, maxlen=count))
        except OSError:
            return ()

    def _write_settings(self) -> None:
        """Readable by this user only: secrets are inside."""
        descriptor = os.open(self.settings, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(settings_toml(self.plan.config))


def describe_exit(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
