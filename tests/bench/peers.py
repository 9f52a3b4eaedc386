"""Steps of several engines in turns, on one core: ours beside vLLM's and llama.cpp's, in the same seconds.

    python -m tests.bench.peers --rounds 6 --arm "ours=python -m tests.bench.peer_ours" \\
        --arm "vllm=/VLLM/bin/python tests/bench/peer_vllm.py /MODEL" --arm "llamacpp=/LLAMA/peer_llamacpp /MODEL.gguf 1"

An arm is a command that loads a model, prints `ready`, and answers each line it reads with one line of `wall/processor` seconds of steps:

    prefill LENGTH                  one prompt of so many tokens, to its first token
    decode BATCH CONTEXT COUNT      COUNT steps of BATCH sequences that see CONTEXT tokens, warm

It computes with one thread, on the core that it inherits (`taskset -c N` before all of this). All arms are loaded before the first case;
those that wait sleep in a read. Processor time is steadier than wall time where others load the machine, though they share its caches.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import msgspec

from pd_serve.bench.machine import MachineWatch

PREFILL = ("prefill 512", "prefill 2048")
DECODE = ("decode 1 256 8", "decode 8 256 8", "decode 16 256 8")


@dataclass(slots=True)
class Arm:
    """A child that answers; `steps` are (wall, processor) seconds by case, one list per round."""

    name: str
    process: subprocess.Popen[str]
    steps: dict[str, list[list[tuple[float, float]]]] = field(default_factory=dict)

    @classmethod
    def start(cls, text: str) -> Arm:
        name, _, command = text.partition("=")
        process = subprocess.Popen(shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        arm = cls(name, process)
        arm._line()
        return arm

    def _line(self) -> str:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"{self.name} ended with {self.process.wait()}")
        return line

    def ask(self, case: str) -> list[tuple[float, float]]:
        assert self.process.stdin is not None
        self.process.stdin.write(case + "\n")
        pairs = (pair.split("/") for pair in self._line().split())
        return [(float(wall), float(cpu)) for wall, cpu in pairs]

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def rounds(self, case: str, column: int) -> list[float]:
        """Of each round the median step."""
        return [median(step[column] for step in steps) for steps in self.steps[case]]


def report(arms: list[Arm], cases: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Figures by case and arm; `ratio` is the first arm's time by this one's, so above 1 this one is faster: the median over rounds."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for case in cases:
        print(case)
        for arm in arms:
            walls, cpus = arm.rounds(case, 0), arm.rounds(case, 1)
            ratios = [
                median(a / b for a, b in zip(arms[0].rounds(case, column), arm.rounds(case, column), strict=True)) for column in (0, 1)
            ]
            figures = {"wall_s": median(walls), "wall_s.min": min(walls), "cpu_s": median(cpus), "ratio": ratios[0], "cpu_ratio": ratios[1]}
            found.setdefault(case, {})[arm.name] = figures
            print(f"  {arm.name:12}", "  ".join(f"{name} {value:.4f}" for name, value in figures.items()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", action="append", required=True, metavar="NAME=COMMAND", help="the first is what ratios refer to")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--cases", default=",".join(PREFILL + DECODE), help="separated by commas")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases = options.cases.split(",")
    arms = [Arm.start(text) for text in options.arm]
    for case in cases:
        for arm in arms:
            arm.ask(case)  # warms up
    with MachineWatch() as watch:
        for turn in range(options.rounds):
            for case in cases:
                for arm in arms[:: 1 if turn % 2 == 0 else -1]:
                    arm.steps.setdefault(case, []).append(arm.ask(case))
    load = watch.load
    print(f"load by others: mean {load.others_cores:.2f} cores, worst second {load.others_cores_max:.2f}, stolen {load.steal_cores:.2f}")
    found = report(arms, cases)
    if options.out is not None:
        options.out.write_text(json.dumps({"load": msgspec.to_builtins(load), "cases": found}, indent=1) + "\n")
    for arm in arms:
        arm.stop()


if __name__ == "__main__":
    main()
