"""The victims test as a user types it, against a server that gives a token every few milliseconds."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from pd_serve.bench.client import LEFT
from pd_serve.bench.records import RequestRecord
from pd_serve.bench.results import read_records, read_result
from pd_serve.bench.victims import LONG, VICTIM
from pd_serve.cli.app import run
from tests.unit.bench.openai_stub import Stub, _chunk, _event, serving

SHORT = ("--slots=2", "--tokens=50", "--long-tokens=64", "--long-output=2", "--interval=0.2", "--count=2", "--lead=0.2")


@dataclass
class Paced(Stub):
    """For clients that may leave at any time."""

    gap_s: float = 0.005

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next((line[15:] for line in head.decode().lower().splitlines() if line.startswith("content-length:")), "0")
                body = json.loads(await reader.readexactly(int(length)) or b"{}")
                self.bodies.append(body)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
                for _ in range(body["max_tokens"]):
                    await asyncio.sleep(self.gap_s)
                    _event(writer, self._token(body))
                    await writer.drain()
                _event(writer, {"choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}]})
                _chunk(writer, b"data: [DONE]\n\n")
                writer.write(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def bench(*arguments: object) -> int:
    return run(["bench", "interference", "--no-clusters", *map(str, arguments)])


def of_kind(records: list[RequestRecord], kind: str) -> list[RequestRecord]:
    return [record for record in records if record.kind == kind]


def test_arms_are_sent_the_same_and_told_beside_their_own_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "test.json"
    with serving(Paced()) as a, serving(Paced()) as b:
        # A name of the model spares the look at /v1/models, which this server does not have.
        assert bench("--model", "stub", "--arm", f"a={a.url}", "--arm", f"b={b.url}", *SHORT, "--out", out, "--json") == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "interference"
    assert len([body for body in a.bodies if len(body["prompt"]) == 64]) == 3, "two in the run, one to warm up"  # type: ignore[arg-type]
    result = read_result(out)
    for arm in result.arms.values():
        records = read_records(out, arm)
        assert [record.planned_s for record in of_kind(records, LONG)] == pytest.approx([0.2, 0.4])
        victims = of_kind(records, VICTIM)
        assert {record.finish_reason for record in victims[:-1]} <= {"length", LEFT}
        assert all(record.ok for record in records)
        assert arm.figures["itl_s.p50"] > 0
        assert arm.figures["baseline_itl_s.p50"] > 0
        assert arm.figures["itl_ratio.p50"] > 0
    first, second = (
        [(record.index, record.num_prompt_tokens) for record in of_kind(read_records(out, arm), LONG)] for arm in result.arms.values()
    )
    assert first == second
    assert {name.rpartition(".png")[0].rpartition(".")[2] for name in result.pictures} == {"gaps-over-time", "gaps-tail", "gaps"}
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in result.pictures)


def test_victims_that_are_through_too_soon_are_an_error_and_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "test.json"
    with serving(Stub()) as stub:
        assert bench("--arm", f"a={stub.url}", *SHORT, "--out", out) == 1
    assert "ran out of requests" in capsys.readouterr().err
    assert not out.exists()
