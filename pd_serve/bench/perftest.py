"""`ucx_perftest`, the measuring tool that comes with UCX, as the yardstick of what a lane gives on this machine.

The libucx wheels carry it without a way to find their libraries; that of an older wheel crashes, so what does not answer is left out, with
the reason. It sends one buffer over and over, which stays in cache, and its receiver looks at nothing and throws away what arrives.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from pd_serve.bench.errors import BenchError

TIMEOUT_S = 30.0
CONNECT_S = 5.0
_MIB = 1 << 20


class Perftest(msgspec.Struct, frozen=True):
    """The tool, and the environment that it runs in."""

    path: str
    library_path: str = ""

    def bandwidth(self, test: str, nbytes: int, tls: str, cores: Sequence[int], options: Sequence[str] = ()) -> float:
        """Bytes per second of `nbytes` at a time between two processes on this machine, for about half a second to a second.

        `test`: such as `ucp_am_bw`. `cores` [2]: of the sender and of the receiver, -1 for any. Raises BenchError.
        """
        port = _free_port()
        env = {**os.environ, **self._env(tls)}
        num_messages = max(64, min(100_000, (512 * _MIB) // nbytes))
        server = subprocess.Popen(
            [self.path, "-p", str(port), *_pin(cores[1])], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env
        )
        try:
            _wait_until_listening(port, server)
            command = [self.path, "127.0.0.1", "-p", str(port), *_pin(cores[0]), "-t", test, "-s", str(nbytes), "-n", str(num_messages)]
            command += ["-w", str(num_messages // 16), "-f", "-v", *options]
            client = subprocess.run(command, capture_output=True, text=True, env=env, timeout=TIMEOUT_S, check=False)
            if client.returncode != 0:
                raise BenchError(f"ucx_perftest {test} ended with {client.returncode}: {_last_line(client.stderr)}")
            return parse_bandwidth(client.stdout)
        except subprocess.TimeoutExpired:
            raise BenchError(f"ucx_perftest {test} did not end within {TIMEOUT_S:g} s") from None
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(2.0)
            server.kill()
            server.wait()

    def runs(self) -> bool:
        try:
            found = subprocess.run(
                [self.path, "-h"], capture_output=True, env={**os.environ, **self._env("self")}, timeout=5.0, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return b"ucp_am_bw" in found.stdout + found.stderr

    def _env(self, tls: str) -> Mapping[str, str]:
        env = {"UCX_TLS": tls, "UCX_LOG_LEVEL": "error", "UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_POSIX_ERROR_HANDLING": "y"}
        if "tcp" in tls.split(","):
            env["UCX_NET_DEVICES"] = "lo"
        if self.library_path:
            env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (self.library_path, os.environ.get("LD_LIBRARY_PATH", ""))))
        return env


def find_perftest(given: str = "") -> Perftest | None:
    """That which was given, that on PATH, or that of the libucx wheel; None when there is none that runs. Raises BenchError for a given
    one that does not."""
    if given:
        tool = Perftest(given, str(Path(given).resolve().parent.parent / "lib"))
        if not tool.runs():
            raise BenchError(f"{given} is no ucx_perftest that runs")
        return tool
    candidates = [Perftest(found)] if (found := shutil.which("ucx_perftest")) else []
    spec = find_spec("libucx")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        candidates.append(Perftest(str(Path(folder) / "bin" / "ucx_perftest"), str(Path(folder) / "lib")))
    return next((tool for tool in candidates if tool.runs()), None)


def parse_bandwidth(output: str) -> float:
    """Bytes per second from the CSV that `-f -v` prints: the column `overall_bw`, which is in MiB per second. Raises BenchError."""
    lines = [line.split(",") for line in output.splitlines() if "," in line]
    header = next((line for line in lines if "overall_bw" in line), None)
    if header is None or lines[-1] is header or len(lines[-1]) != len(header):
        raise BenchError(f"ucx_perftest said nothing of a bandwidth: {_last_line(output)}")
    return float(lines[-1][header.index("overall_bw")]) * _MIB


def _pin(core: int) -> list[str]:
    return ["-c", str(core)] if core >= 0 else []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_listening(port: int, server: subprocess.Popen[bytes]) -> None:
    """A connection would be taken for the client's: the kernel's table of listening sockets is looked at instead."""
    pause = 0.01
    waited = 0.0
    while waited < CONNECT_S:
        if _is_listening(port):
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(pause)
            raise BenchError(f"ucx_perftest ended at once with {server.returncode}")
        waited += pause
    raise BenchError(f"ucx_perftest did not listen within {CONNECT_S:g} s")


def _is_listening(port: int) -> bool:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    return True
    return False


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no output"
