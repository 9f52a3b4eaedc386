"""Every figure of the published arithmetic on prefill/decode disaggregation, to the digits given. GB is 1e9 bytes, KiB 1024 bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pd_serve.kv.layout import KVDtype
from pd_serve.plan.cost import Setting, Speed, hand_over, pause, prompt_cost
from pd_serve.plan.hardware import accelerator, link
from pd_serve.plan.models import model_shape, with_params
from pd_serve.plan.ratio import Demand, Supply, need, ratio

BF16, FP8 = KVDtype.BFLOAT16, KVDtype.FP8_E4M3
LLAMA_8B, LLAMA_70B, DEEPSEEK_V3 = (model_shape(name) for name in ("Llama-3.1-8B", "Llama-3.1-70B", "DeepSeek-V3"))
DENSE_70B = with_params(LLAMA_70B, 70e9)
PUBLISHED = Setting(shape=DENSE_70B, speed=Speed(flop_per_s=4 * 400e12), decode_tp=4)
"""70B dense, 4 GPUs at 400 effective TFLOP/s each, 2 x params FLOP per token, line rate, no overlap."""
PUBLISHED_FP8 = Setting(shape=DENSE_70B, speed=PUBLISHED.speed, dtype=FP8, decode_tp=4)
OTHER_8_GPUS = Setting(shape=LLAMA_70B, speed=Speed(flop_per_s=8 * accelerator("H100").bf16_flop_per_s * 0.5))

KIB, GB, MS, PERCENT = 1 / 1024, 1e-9, 1e3, 100


def wire(setting: Setting, num_tokens: int, path: str) -> float:
    return hand_over(setting, num_tokens, link(path)).wire_s


def part(setting: Setting, num_tokens: int, path: str) -> float:
    return hand_over(setting, num_tokens, link(path)).share


def rows(num_tokens: int, gigabytes: str, prefill_ms: str, *paths: tuple[str, str, str]) -> list[tuple[str, Callable[[], float], str]]:
    """One row of the table of transfer against prefill; `paths`: link, milliseconds, percent."""
    found: list[tuple[str, Callable[[], float], str]] = [
        (f"{num_tokens} tokens KV, GB", lambda: GB * prompt_cost(PUBLISHED, num_tokens, []).kv_nbytes, gigabytes),
        (f"{num_tokens} tokens prefill, ms", lambda: MS * PUBLISHED.prefill_s(num_tokens), prefill_ms),
    ]
    for path, milliseconds, percent in paths:
        found += [
            (f"{num_tokens} tokens at {path} Gb/s, ms", lambda path=path: MS * wire(PUBLISHED, num_tokens, path), milliseconds),
            (f"{num_tokens} tokens at {path} Gb/s, %", lambda path=path: PERCENT * part(PUBLISHED, num_tokens, path), percent),
        ]
    return found


FIGURES: list[tuple[str, Callable[[], float], str]] = [
    # KV bytes per token
    ("Llama-3.1-8B bf16, KiB", lambda: KIB * LLAMA_8B.bytes_per_token(BF16), "128"),
    ("Llama-3.1-8B fp8, KiB", lambda: KIB * LLAMA_8B.bytes_per_token(FP8, has_scales=False), "64"),
    ("Llama-3.1-70B bf16, KiB", lambda: KIB * LLAMA_70B.bytes_per_token(BF16), "320"),
    ("Llama-3.1-70B fp8, KiB", lambda: KIB * LLAMA_70B.bytes_per_token(FP8, has_scales=False), "160"),
    ("DeepSeek-V3 bf16, B", lambda: DEEPSEEK_V3.bytes_per_token(BF16), "70272"),
    # transfer against prefill
    *rows(2048, "0.67", "179", ("100", "54", "30"), ("200", "27", "15"), ("400", "13", "7")),
    *rows(8192, "2.68", "717", ("100", "215", "30"), ("200", "107", "15"), ("400", "54", "7")),
    *rows(32_768, "10.74", "2867", ("100", "859", "30"), ("200", "429", "15"), ("400", "215", "7")),
    # 4,096 tokens
    ("4,096 tokens of 70B, GB", lambda: GB * 4096 * LLAMA_70B.bytes_per_token(BF16), "1.34"),
    ("the same on 400 Gb/s, ms", lambda: MS * wire(PUBLISHED, 4096, "400"), "27"),
    ("4,096 tokens of DeepSeek-V3, GB", lambda: GB * 4096 * DEEPSEEK_V3.bytes_per_token(BF16), "0.29"),
    (
        "the same on 400 Gb/s, ms, DeepSeek-V3",
        lambda: MS * wire(Setting(shape=DEEPSEEK_V3, speed=PUBLISHED.speed), 4096, "400"),
        "6",
    ),
    ("parameters of 70B, billions", lambda: LLAMA_70B.num_params / 1e9, "70.55"),
    ("prefill of 4,096 on 8 x 989 TFLOP/s at 50 %, ms", lambda: MS * OTHER_8_GPUS.prefill_s(4096), "146"),
    # pauses of a colocated decode
    ("pause of 8,192 whole, ms", lambda: MS * pause(PUBLISHED, 8192).longest_s, "717"),
    ("pause in chunks of 2,048, ms", lambda: MS * pause(PUBLISHED, 8192, 2048).longest_s, "179"),
    ("pause in chunks of 512, ms", lambda: MS * pause(PUBLISHED, 8192, 512).longest_s, "45"),
    # ratio of instances
    ("2,000 in, prefill instances", lambda: need(30, Demand(2000, 300), Supply(20_000, 3000)).num_prefill, "3"),
    ("2,000 in, decode instances", lambda: need(30, Demand(2000, 300), Supply(20_000, 3000)).num_decode, "3"),
    ("8,000 in, prefill instances", lambda: need(30, Demand(8000, 300), Supply(20_000, 3000)).num_prefill, "12"),
    ("8,000 in, decode instances", lambda: need(30, Demand(8000, 300), Supply(20_000, 3000)).num_decode, "3"),
    ("4,000 in, 500 out, R", lambda: ratio(Demand(4000, 500), Supply(4000, 500)), "1"),
    ("1,000 in, 8,000 out, R", lambda: ratio(Demand(1000, 8000), Supply(4000, 500)), "0.015625"),
]


@pytest.mark.parametrize(("compute", "given"), [pytest.param(compute, given, id=name) for name, compute, given in FIGURES])
def test_published_figures_come_out_to_the_digits_given(compute: Callable[[], float], given: str) -> None:
    digits = len(given.partition(".")[2])
    assert f"{compute():.{digits}f}" == given


@pytest.mark.parametrize("num_tokens", [2048, 8192, 32_768])
@pytest.mark.parametrize("path", ["100", "200", "400"])
def test_fp8_halves_bytes_and_times(num_tokens: int, path: str) -> None:
    assert 2 * prompt_cost(PUBLISHED_FP8, num_tokens, []).kv_nbytes == prompt_cost(PUBLISHED, num_tokens, []).kv_nbytes
    assert 2 * wire(PUBLISHED_FP8, num_tokens, path) == pytest.approx(wire(PUBLISHED, num_tokens, path))


def test_the_ratio_does_not_depend_on_the_length_until_attention_is_counted_which_lowers_it() -> None:
    counted = Setting(shape=DENSE_70B, speed=PUBLISHED.speed, has_attention=True)
    lengths = (1, 2048, 8192, 32_768, 131_072)
    plain = [part(PUBLISHED, length, "100") for length in lengths]
    assert plain == pytest.approx([plain[0]] * len(lengths))
    lower = [part(counted, length, "100") for length in lengths]
    assert lower == sorted(lower, reverse=True)
    assert all(value < without for value, without in zip(lower, plain, strict=True))


def test_a_figure_off_by_a_digit_is_noticed() -> None:
    """The comparison would see a wrong shape: a layer fewer is another figure."""
    import msgspec

    shallow = msgspec.structs.replace(LLAMA_70B, num_layers=79)
    assert f"{KIB * shallow.bytes_per_token(BF16):.0f}" != "320"
    assert f"{MS * hand_over(Setting(shape=shallow, speed=PUBLISHED.speed), 2048, link('100')).wire_s:.0f}" != "54"
