"""Status: the JSON that scripts rely on, the table that people read."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pd_serve.cli.app import run
from pd_serve.protocol.control import STATUS_PATH, BlockStatus, BreakerStatus, PairStatus, PeerLaneStatus, RouterStatus, WorkerStatus
from pd_serve.protocol.link import Role

sys.path.insert(0, str(Path(__file__).parent))
from endpoints import serving

WORKER = WorkerStatus(
    id="decode-0",
    role=Role.DECODE,
    incarnation=7,
    address="http://127.0.0.1:8201",
    pid=10,
    rank_pids=(11,),
    ready=True,
    draining=False,
    blocks=BlockStatus(total=100, free=40, cached=20, leased=5, quarantined=1),
    leases=2,
    running=3,
    waiting=4,
    prefill_queue_tokens=555,
    peers=(PeerLaneStatus(peer="p", joined=True, lane="posix", one_sided=True, bandwidth_bytes_per_s=1.0, detail=""),),
)
STATUS = RouterStatus(router_id="r", model="demo", open_requests=9, queued_requests=1, workers=(WORKER,))


def answers(status: RouterStatus) -> dict[str, tuple[int, object]]:
    return {STATUS_PATH: (200, json.loads(status.model_dump_json()))}


def test_json_has_the_names_that_scripts_rely_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_SERVE_SECURITY_CLUSTER_SECRET", "s")
    with serving(answers(STATUS)) as endpoint:
        assert run(["status", "--json", "--router", endpoint.url]) == 0
    (worker,) = json.loads(capsys.readouterr().out)["workers"]
    names = {
        "id",
        "role",
        "incarnation",
        "address",
        "pid",
        "rank_pids",
        "ready",
        "blocks",
        "leases",
        "running",
        "waiting",
        "prefill_queue_tokens",
    }
    assert names <= worker.keys()
    assert worker["blocks"] == {"total": 100, "free": 40, "cached": 20, "leased": 5, "quarantined": 1}
    assert endpoint.authorizations == ["Bearer s"]


def test_the_secret_may_come_from_a_settings_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As pd-serve up writes one: where it listens beyond loopback it draws a secret that stands nowhere else."""
    (tmp_path / "router.toml").write_text('[security]\ncluster_secret = "drawn"\n')
    with serving(answers(STATUS)) as endpoint:
        assert run(["status", "--json", "--router", endpoint.url, "--config", str(tmp_path / "router.toml")]) == 0
    assert endpoint.authorizations == ["Bearer drawn"]


def test_table_shows_queues_and_memory(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with serving(answers(STATUS)) as endpoint:
        assert run(["status", "--once", "--router", endpoint.url]) == 0
    text = capsys.readouterr().out
    for word in ("decode-0", "ready", "555", "40/100", "+20 cached", "1 quarantined", "1 posix", "demo"):
        assert word in text


def test_table_shows_a_breaker_that_is_not_closed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    breakers = (BreakerStatus(leg="prefill", state="closed", failures=1), BreakerStatus(leg="decode", state="open", failures=5))
    status = STATUS.model_copy(update={"workers": (WORKER.model_copy(update={"breakers": breakers}),)})
    with serving(answers(status)) as endpoint:
        assert run(["status", "--once", "--router", endpoint.url]) == 0
    assert "decode breaker open" in capsys.readouterr().out


def test_pairs_are_shown_with_their_conversion_or_why_they_do_not_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    fits = PairStatus(
        prefill="p0", decode="d0", compatible=True, reason="", joined=True, lane="posix", conversion="block 16->64, bf16->fp8"
    )
    differs = fits.model_copy(update={"decode": "d1", "compatible": False, "reason": "rope a and b", "joined": False, "lane": ""})
    status = STATUS.model_copy(update={"pairs": (fits, differs)})
    with serving(answers(status)) as endpoint:
        assert run(["status", "--once", "--pairs", "--router", endpoint.url]) == 0
        shown = capsys.readouterr().out
        assert run(["status", "--json", "--pairs", "--router", endpoint.url]) == 0
    for word in ("p0", "d1", "joined", "posix", "block 16->64, bf16->fp8", "incompatible", "rope a and b"):
        assert word in shown
    pairs = json.loads(capsys.readouterr().out)["pairs"]
    assert list(pairs[0]) == ["prefill", "decode", "compatible", "reason", "joined", "lane", "conversion"]
    with serving(answers(STATUS)) as endpoint:
        assert run(["status", "--once", "--pairs", "--router", endpoint.url]) == 0
    assert "no pairs" in capsys.readouterr().out


def test_a_narrow_terminal_cuts_no_name_state_or_count(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with serving(answers(STATUS)) as endpoint:
        assert run(["status", "--once", "--router", endpoint.url]) == 0
    text = capsys.readouterr().out
    assert "\u2026" not in text
    for word in ("decode-0", "ready", "555", "leases", "40/100", "posix"):
        assert word in text


def test_no_workers_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(answers(STATUS.model_copy(update={"workers": (), "model": None}))) as endpoint:
        assert run(["status", "--router", endpoint.url]) == 0
    assert "no workers" in capsys.readouterr().out


def test_something_else_at_the_address_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with serving({STATUS_PATH: (200, {"hello": 1})}) as endpoint:
        assert run(["status", "--router", endpoint.url]) == 1
    assert "not a pd-serve router" in capsys.readouterr().err


def test_table_says_how_many_ranks_a_worker_has(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    status = STATUS.model_copy(update={"workers": (WORKER.model_copy(update={"rank_pids": (11, 12)}),)})
    with serving(answers(status)) as endpoint:
        assert run(["status", "--once", "--router", endpoint.url]) == 0
    assert "decode x2" in capsys.readouterr().out
