"""Hand-overs, pauses and links, beyond the published figures, which test_oracle.py asserts."""

from __future__ import annotations

import pytest

from pd_serve.kv.layout import KVDtype
from pd_serve.plan.cost import Setting, Speed, hand_over, pause, prompt_cost, shortest_prompt
from pd_serve.plan.errors import PlanError
from pd_serve.plan.hardware import ACCELERATORS, LINKS, Link, accelerator, link
from pd_serve.plan.models import model_shape

LLAMA = model_shape("Llama-3.1-8B")
FAST = Speed(flop_per_s=400e12)


def walk(prefill_s: float, wire_s: float, num_layers: int) -> float:
    """When the last layer has arrived, layer by layer, less the end of prefill."""
    free_at = 0.0
    for layer in range(num_layers):
        free_at = max(free_at, (layer + 1) * prefill_s / num_layers) + wire_s / num_layers
    return free_at - prefill_s


@pytest.mark.parametrize("bytes_per_s", [1e7, 1e8, 1e9, 2.5e9, 3e9, 5e10, 1e15])
def test_what_is_exposed_is_what_a_walk_through_the_layers_finds(bytes_per_s: float) -> None:
    setting = Setting(shape=LLAMA, speed=FAST)
    found = hand_over(setting, 2048, Link("x", bytes_per_s, ""))
    assert found.exposed_s == pytest.approx(walk(setting.prefill_s(2048), found.wire_s, 32), rel=1e-6)


def test_set_up_is_exposed_either_way() -> None:
    with_setup, without = (hand_over(Setting(shape=LLAMA, speed=FAST, setup_s=s), 128, link("400")) for s in (0.005, 0.0))
    assert with_setup.exposed_s - without.exposed_s == pytest.approx(0.005)
    assert with_setup.whole_s - without.whole_s == pytest.approx(0.005)
    assert with_setup.wire_s == without.wire_s


def test_links_side_by_side_share_the_bytes() -> None:
    one, four = (hand_over(Setting(shape=LLAMA, speed=FAST, num_links=n), 4096, link("100")).wire_s for n in (1, 4))
    assert one == pytest.approx(4 * four)


def test_copies_for_ranks_beyond_the_kv_heads_are_sent_too() -> None:
    once, twice = (prompt_cost(Setting(shape=LLAMA, speed=FAST, decode_tp=tp), 100, []) for tp in (8, 16))
    assert twice.sent_nbytes == 2 * once.sent_nbytes
    assert twice.kv_nbytes == once.kv_nbytes


def test_scales_of_fp8_are_sent_too() -> None:
    plain, scaled = (Setting(shape=LLAMA, speed=FAST, dtype=KVDtype.FP8_E4M3, has_scales=has) for has in (False, True))
    assert scaled.bytes_per_token - plain.bytes_per_token == 2 * 32 * 8


def test_a_window_lowers_what_is_seen_and_not_what_is_sent() -> None:
    gemma = prompt_cost(Setting(shape=model_shape("gemma-3-27b-it"), speed=FAST), 32_768, [])
    assert gemma.sent_nbytes == gemma.kv_nbytes
    assert gemma.seen_nbytes == pytest.approx(gemma.kv_nbytes * (52 / 32 + 10) / 62)


def test_chunks_pause_for_their_longest_step_and_later_ones_see_more() -> None:
    setting = Setting(shape=LLAMA, speed=FAST, has_attention=True)
    steps = [setting.prefill_s(min(512, 5000 - start), start) for start in range(0, 5000, 512)]
    found = pause(setting, 5000, 512)
    assert (found.num_steps, found.longest_s) == (10, max(steps))
    assert found.longest_s > steps[0]
    assert sum(steps) == pytest.approx(pause(setting, 5000).longest_s)


def test_a_measured_speed_stands_for_everything() -> None:
    setting = Setting(shape=LLAMA, speed=Speed(tokens_per_s=1000), has_attention=True)
    assert setting.prefill_s(500, 10_000) == 0.5


def test_short_prompts_wait_longest_by_their_prefill() -> None:
    setting = Setting(shape=LLAMA, speed=FAST, setup_s=0.005)
    least = shortest_prompt(setting, link("400"), 0.1, 131_072)
    assert least is not None
    assert hand_over(setting, least, link("400")).exposed_share <= 0.1 < hand_over(setting, least - 1, link("400")).exposed_share
    assert shortest_prompt(setting, Link("slow", 1e6, ""), 0.1, 131_072) is None


@pytest.mark.parametrize("speed", [Speed(), Speed(1e12, 1000), Speed(-1.0)])
def test_one_speed_is_needed(speed: Speed) -> None:
    with pytest.raises(PlanError, match="one of them"):
        Setting(shape=LLAMA, speed=speed)


@pytest.mark.parametrize(
    ("values", "words"), [({"setup_s": -1.0}, "set-up of -1"), ({"num_links": 0}, "at least 1"), ({"decode_tp": 0}, "at least 1")]
)
def test_settings_that_cannot_be_are_named(values: dict[str, float], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Setting(shape=LLAMA, speed=FAST, **values)  # type: ignore[arg-type]


def test_no_prompt_costs_nothing_and_is_refused() -> None:
    with pytest.raises(PlanError, match="prompt of 0 tokens"):
        prompt_cost(Setting(shape=LLAMA, speed=FAST), 0, [])


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("400", 50e9),
        ("100Gb/s", 12.5e9),
        ("200 gbps", 25e9),
        ("12.5GB/s", 12.5e9),
        ("800 MB/s", 8e8),
        ("3.2e9B/s", 3.2e9),
        ("1GiB/s", 1 << 30),
        ("NVLink", 450e9),
    ],
)
def test_links_are_named_or_given_in_bits_or_bytes(text: str, bytes_per_s: float) -> None:
    assert link(text).bytes_per_s == bytes_per_s


@pytest.mark.parametrize("text", ["", "fast", "0", "-5", "100Tb/s", "10 b/s", "gb/s"])
def test_what_is_no_link_is_told_with_examples(text: str) -> None:
    with pytest.raises(PlanError, match=r"is no link: expected shm.*400Gb/s"):
        link(text)


def test_every_figure_has_a_source() -> None:
    assert all(each.source and each.bytes_per_s > 0 for each in LINKS)
    assert all(each.source and each.bf16_flop_per_s > 0 and each.memory_bytes_per_s > 0 for each in ACCELERATORS)
    assert accelerator("h100").bf16_flop_per_s == 989e12
    with pytest.raises(PlanError, match="no figures for a GPU 'H1000'"):
        accelerator("H1000")
