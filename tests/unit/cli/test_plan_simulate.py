"""`pd-serve plan simulate` as a user types it: tables, JSON, pictures, files to deploy, and one line for what does not fit."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from pd_serve.bench.statistics import Slo
from pd_serve.cli.app import app, run
from pd_serve.cli.plan_simulate import EPILOG
from pd_serve.config_sources import RoleTable, Sources, load_config
from pd_serve.plan import trials
from pd_serve.plan.outcome import Outcome, Served
from pd_serve.plan.sim.fleet import Look, RoleLook
from pd_serve.plan.sim.spec import FleetSpec
from pd_serve.plan.worker_model import WorkerModel
from pd_serve.plan.workload import Requests
from pd_serve.protocol.link import Role

ROOT = Path(__file__).resolve().parents[3]
LIMITS = ("--slo-ttft-ms", "500", "--slo-itl-ms", "50")
LOAD = ("--input", "1000", "--output", "100", "--limit", "60")


@pytest.fixture
def worker(tmp_path: Path) -> str:
    """10,000 prompt tokens and 1,000 output tokens per second."""
    path = tmp_path / "worker.json"
    model = WorkerModel(
        name="toy on 1 core",
        num_gpus=1,
        prefill=(0.0, 1e-4, 0.0),
        decode=(0.01, 0.0, 0.0009),
        num_kv_tokens=100_000,
        kv_bytes_per_token=1000,
        num_layers=4,
        max_batch_tokens=2048,
        max_running=100,
        handover_s=0.001,
    )
    model.write(path)
    return str(path)


@pytest.fixture
def arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the simulator's place: within the limits are as many per second as the fullest pool lets through; large chunks stall decode."""

    def simulate(
        spec: FleetSpec,
        requests: Requests,
        slo: Slo,
        seed: int,
        progress: Callable[[int], None] | None = None,
        watch: Callable[[Look], None] | None = None,
    ) -> Outcome:
        outcome = Outcome(slo, spec.num_gpus)
        planned = list(requests)
        count = {group.role: group.count for group in spec.groups}
        pool = count.get(Role.BOTH, 0)
        most = 5.0 * pool if pool else min(10.0 * count[Role.PREFILL], 10.0 * count[Role.DECODE])
        rate = (len(planned) - 1) / (planned[-1].at_s - planned[0].at_s)
        share = 0.0 if spec.chunk_budget > 1024 else min(1.0, most * (1 if not pool else spec.chunk_budget / 2048) / rate)
        for number, request in enumerate(planned):
            is_met = (number + 1) * share // 1 > number * share // 1
            ttft_s = 0.1 if is_met else 2.0
            outcome.add_request(Served(request.at_s, ttft_s, ttft_s + 1.0, request.num_prompt, 0, request.num_output))
            outcome.add_gaps(0.01, request.num_output - 1)
        if progress is not None:
            progress(len(planned))
        if watch is not None:
            watch(Look(1.0, 2, {role.value: RoleLook(0.5, 3, 1) for role in count}))
        return outcome

    monkeypatch.setattr(trials, "simulate", simulate)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["plan", "simulate", *arguments, *LIMITS, *LOAD, "--processes", "1", "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def names(arms: list[dict[str, Any]]) -> list[str]:
    return ["+".join(f"{pool['count']}{pool['role']}" for pool in arm["fleet"]["pools"]) for arm in arms]


@pytest.mark.usefixtures("arithmetic")
def test_a_search_sets_the_best_split_beside_the_best_pool(capsys: pytest.CaptureFixture[str], worker: str) -> None:
    study = planned(capsys, "--workers", worker, "--gpus", "4")["study"]
    assert names(study["arms"]) == ["2prefill+2decode", "4both"]
    assert study["arms"][1]["fleet"]["chunk_budget"] == 1024
    assert study["arms"][0]["goodput"]["0.99"] == pytest.approx(20, rel=0.2)
    assert study["arms"][1]["goodput"]["0.99"] == pytest.approx(10, rel=0.2)
    assert study["verdict"][0].startswith("part prefill from decode")


@pytest.mark.usefixtures("arithmetic")
def test_a_table_for_people_has_fleets_figures_and_verdict(capsys: pytest.CaptureFixture[str], worker: str) -> None:
    fleet = ("--prefill", "1", "--decode", "2", "--rate", "4", "--scale", "10")
    assert run(["plan", "simulate", "--workers", worker, *fleet, *LIMITS, *LOAD, "--processes", "1"]) == 0
    text = capsys.readouterr().out
    for words in (
        "1P2D",
        "3C 1024",
        "10P20D",
        "goodput at 99%",
        "TTFT p99",
        "ITL p90",
        "turned away",
        "10 times as fast",
        "Verdict:",
        "toy on 1 core",
    ):
        assert words in text, words


@pytest.mark.usefixtures("arithmetic")
def test_one_pool_with_a_budget_is_looked_at_alone(capsys: pytest.CaptureFixture[str], worker: str) -> None:
    study = planned(capsys, "--workers", worker, "--colocated", "2", "--chunk-budget", "512", "--rate", "1", "--one-load")["study"]
    assert (names(study["arms"]), study["verdict"], study["curves"]) == (["2both"], [], [])


@pytest.mark.usefixtures("arithmetic")
def test_roles_may_have_models_of_their_own(capsys: pytest.CaptureFixture[str], worker: str) -> None:
    arguments = ("--workers", f"prefill={worker}", "--workers", f"decode={worker}", "--prefill", "1", "--decode", "1")
    assert names(planned(capsys, *arguments)["study"]["arms"]) == ["1prefill+1decode"]


@pytest.mark.usefixtures("arithmetic")
def test_pictures_and_files_to_deploy_are_written(capsys: pytest.CaptureFixture[str], worker: str, tmp_path: Path) -> None:
    out = tmp_path / "plan"
    arguments = ("--gpus", "4", "--model", "demo", "--out", str(out), "--emit", "compose", "--set", "router.policy=cache_aware")
    told = planned(capsys, "--workers", worker, *arguments)
    expected = {"compose.yaml", "pd-serve.toml", "study.json", "goodput.png", "splits.png", "ttft.png", "itl.png", "use.png", "queue.png"}
    assert {Path(path).name for path in told["files"]} == expected == {path.name for path in out.iterdir()}
    assert msgspec.json.decode((out / "study.json").read_bytes())["study"] == told["study"]
    settings = load_config(Sources(file=out / "pd-serve.toml"), RoleTable.DECODE)
    assert (settings.launch.prefill, settings.launch.decode, settings.router.policy, settings.engine.max_running) == (
        2,
        2,
        "cache_aware",
        100,
    )
    assert "part prefill from decode" in (out / "compose.yaml").read_text()


def test_every_command_line_that_is_written_down_is_taken() -> None:
    root: Any = typer.main.get_command(app)
    command = root.commands["plan"].commands["simulate"]
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in ("docs/planning.md", "README.md"))
    lines = re.findall(r"^(?:\$|  +)? ?pd-serve plan simulate (.*)$", (text + EPILOG).replace("\\\n", " "), re.MULTILINE)
    assert len(lines) >= 3
    for line in lines:
        command.make_context("simulate", shlex.split(line))


def test_the_router_itself_decides_in_a_simulation(capsys: pytest.CaptureFixture[str], worker: str) -> None:
    """The whole way, with the real simulator: in several processes the same answer as in one."""
    arguments = ["plan", "simulate", "--workers", worker, "--gpus", "2", *LIMITS, *LOAD, "--chunk-budget", "512", "--json"]
    answers = []
    for processes in ("1", "2"):
        assert run([*arguments, "--processes", processes]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]
    assert names(answers[0]["study"]["arms"]) == ["1prefill+1decode", "2both"]
    assert answers[0]["study"]["arms"][0]["at_load"]["figures"]["requests"] == 60


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpus", "2", *LIMITS), "what are the workers?"),
        (("--workers", "WORKER", *LIMITS), "which fleet?"),
        (("--workers", "WORKER", "--gpus", "2", "--prefill", "1", *LIMITS), "which fleet?"),
        (("--workers", "WORKER", "--prefill", "1", *LIMITS), "--prefill and --decode"),
        (("--workers", "WORKER", "--gpus", "2"), "--slo-ttft-ms"),
        (("--workers", "WORKER", "--gpus", "1", *LIMITS), "too few"),
        (("--workers", "both=WORKER", "--gpus", "2", *LIMITS), "prefill, decode, colocated"),
        (("--workers", "prefill=WORKER", "--gpus", "2", *LIMITS), "both roles"),
        (("--workers", "WORKER", "--workers", "WORKER", "--prefill", "1", "--decode", "1", *LIMITS), "2 worker models"),
        (("--workers", "/no/such.json", "--gpus", "2", *LIMITS), "/no/such.json"),
        (("--workers", "WORKER", "--gpus", "2", "--emit", "compose", *LIMITS), "--out"),
        (("--workers", "WORKER", "--gpus", "2", "--emit", "compose", "--out", "x", *LIMITS), "--model"),
        (("--workers", "WORKER", "--gpus", "2", "--one-load", *LIMITS), "--rate"),
        (("--workers", "WORKER", "--gpus", "2", "--link", "slow", *LIMITS), "no link"),
        (("--workers", "WORKER", "--gpus", "2", "--trace", "/no/trace", *LIMITS), "/no/trace"),
        (("--workers", "WORKER", "--gpus", "2", "--fail", "decode", *LIMITS), "decode-0@60+30"),
        (("--workers", "WORKER", "--gpus", "2", "--set", "router.policy=best", *LIMITS), "router.policy"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], worker: str, arguments: tuple[str, ...], words: str
) -> None:
    assert run(["plan", "simulate", *(argument.replace("WORKER", worker) for argument in arguments), "--processes", "1"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert words in lines[0]
