"""When it pays: every rule for itself, on the published setting."""

from __future__ import annotations

import msgspec
import pytest

from pd_serve.kv.layout import KVDtype
from pd_serve.plan.cost import Setting, Speed
from pd_serve.plan.hardware import Link, link
from pd_serve.plan.models import model_shape
from pd_serve.plan.verdict import TAILS, Answer, Hints, Verdict, verdict

SETTING = Setting(shape=model_shape("Llama-3.1-70B"), speed=Speed(flop_per_s=1.6e15), decode_tp=4)
STRICT = Hints(prompt_tokens=8192, itl_slo_s=0.03, concurrency=64, num_workers=16)


def judge(hints: Hints = STRICT, path: str | Link = "400", setting: Setting = SETTING, **changes: object) -> Verdict:
    return verdict(setting, link(path) if isinstance(path, str) else path, msgspec.structs.replace(hints, **changes))


def test_a_strict_limit_that_no_chunk_keeps_says_yes() -> None:
    found = judge()
    assert found.answer is Answer.YES
    assert "no chunk keeps the ITL limit of 30 ms" in found.reasons[0]
    assert any("400 Gb/s is wide enough" in line for line in found.conditions)


def test_a_limit_that_chunks_keep_says_chunked_prefill_unless_prompts_come_in_bursts() -> None:
    calm = judge(itl_slo_s=0.1)
    assert (calm.answer, calm.advice) == (Answer.NO, "use chunked prefill in one pool")
    assert "chunked prefill in one pool may do" in calm.against[0]
    bursty = judge(itl_slo_s=0.1, is_bursty=True)
    assert bursty.answer is Answer.YES
    assert "in a burst every step carries one" in bursty.reasons[0]


def test_a_limit_that_even_the_whole_prompt_keeps_says_no() -> None:
    assert judge(itl_slo_s=2.0).answer is Answer.NO


def test_different_parallelism_is_a_reason_of_its_own() -> None:
    assert judge(itl_slo_s=0.1, has_different_tp=True).answer is Answer.YES


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"is_offline": True}, "offline"),
        ({"num_workers": 1}, "one worker"),
        ({"prompt_tokens": 256, "concurrency": 4}, "short and few"),
    ],
)
def test_offline_single_or_short_and_few_says_no_whatever_the_limit(changes: dict[str, object], words: str) -> None:
    found = judge(**changes)
    assert found.answer is Answer.NO
    assert words in found.against[0]


def test_short_prompts_at_high_concurrency_are_not_ruled_out() -> None:
    assert judge(prompt_tokens=256, concurrency=200, itl_slo_s=0.01).answer is Answer.YES


def test_a_small_pool_is_perhaps_only() -> None:
    found = judge(num_workers=2)
    assert found.answer is Answer.PERHAPS
    assert "neither batches well" in found.against[-1]


def test_a_narrow_path_is_judged_by_its_ratio() -> None:
    found = judge(path="100")
    assert found.answer is Answer.YES
    assert any("100 Gb/s or less, so the ratio decides" in line and "fp8 KV halves it" in line for line in found.conditions)
    fp8 = judge(path="100", setting=msgspec.structs.replace(SETTING, dtype=KVDtype.FP8_E4M3))
    assert not any("halves" in line for line in fp8.conditions)


def test_a_path_slower_than_prefill_stands_against_it() -> None:
    found = judge(path=Link("10 Gb/s", 1.25e9, ""))
    assert found.answer is Answer.PERHAPS
    assert any("10 Gb/s" in line for line in found.against)


def test_prompts_too_short_for_the_set_up_are_told() -> None:
    found = judge(setting=msgspec.structs.replace(SETTING, setup_s=0.005))
    assert any("compute those where they decode" in line for line in found.conditions)


def test_without_a_limit_it_asks_for_one() -> None:
    found = judge(itl_slo_s=0.0)
    assert found.answer is Answer.PERHAPS
    assert "--itl-slo-ms" in found.advice
    assert judge(itl_slo_s=0.0, is_bursty=True).answer is Answer.YES
    assert judge(itl_slo_s=0.0, prompt_tokens=300).answer is Answer.NO


def test_it_never_promises_throughput() -> None:
    for hints in (STRICT, msgspec.structs.replace(STRICT, is_offline=True), Hints(prompt_tokens=100)):
        assert TAILS in judge(hints).conditions
