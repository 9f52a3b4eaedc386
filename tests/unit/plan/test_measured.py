"""T_P and T_D from what workers count, and when the figures are called capacities."""

from __future__ import annotations

import pytest

from pd_serve.plan.errors import PlanError
from pd_serve.plan.measured import Measured, Reading, WorkerWindow, measured, read_metrics, seen_by_router, worker_window
from pd_serve.protocol.link import Role

NOBODY = seen_by_router({}, {})


def look(
    prefill: tuple[float, float] = (0, 0),
    decode: tuple[float, float] = (0, 0),
    mixed_s: float = 0.0,
    steps: float = 0.0,
    waiting: float = 0.0,
    used: float = 0.0,
) -> Reading:
    """(tokens, seconds) of either phase since the worker's start; `used` of 100 blocks."""
    return {
        ("computed_tokens_total", "prefill"): prefill[0],
        ("computed_tokens_total", "decode"): decode[0],
        ("compute_seconds_total", "prefill"): prefill[1],
        ("compute_seconds_total", "decode"): decode[1],
        ("compute_seconds_total", "mixed"): mixed_s,
        ("step_seconds_count", ""): steps,
        ("waiting_sequences", ""): waiting,
        ("blocks", "used"): used,
        ("blocks", "cached"): 5.0,
        ("blocks", "free"): 95.0 - used,
    }


def prefill_worker(tokens: float, seconds: float, waiting: float = 0.0) -> WorkerWindow:
    return worker_window("p", Role.PREFILL, [look(prefill=(100, 1)), look(prefill=(100 + tokens, 1 + seconds), waiting=waiting)])


def decode_worker(tokens: float, seconds: float, steps: float, used: float = 0.0) -> WorkerWindow:
    return worker_window("d", Role.DECODE, [look(), look(decode=(tokens, seconds), steps=steps, used=used)])


def of_pair(prefill: WorkerWindow, decode: WorkerWindow, itl_slo_s: float = 0.0) -> Measured:
    return measured([prefill, decode], NOBODY, 10.0, itl_slo_s)


def test_throughput_is_tokens_by_the_time_it_took_and_not_by_the_window() -> None:
    found = of_pair(prefill_worker(2000, 2.0), decode_worker(300, 3.0, 100))
    assert found.prefill is not None
    assert found.decode is not None
    assert (found.prefill.tokens_per_s, found.prefill.busy_share) == (1000, 0.2)
    assert (found.decode.tokens_per_s, found.decode.busy_share) == (100, 0.3)
    assert (found.mean_batch, found.step_s) == (3, 0.03)


def test_a_low_load_is_no_capacity_and_says_so() -> None:
    found = of_pair(prefill_worker(2000, 2.0), decode_worker(300, 3.0, 100, used=3))
    assert not found.is_capacity
    assert found.prefill is not None
    assert "not seen to be a capacity: 2,000 prompt tokens in 10 s, busy 20%" in found.prefill.words
    assert found.decode is not None
    assert "too low a load" in found.decode.words
    assert "3.0 sequences in a step of 30.0 ms, at most 3% of the KV blocks" in found.decode.words
    assert "N_D comes out too large" in found.decode.words


@pytest.mark.parametrize(
    ("decode", "itl_slo_s", "words"),
    [
        (decode_worker(300, 9.0, 100, used=85), 0.0, "KV pool was nearly full"),
        (decode_worker(300, 9.0, 100), 0.1, "near the ITL limit of 100 ms"),
    ],
)
def test_a_full_pool_or_steps_near_the_limit_make_decode_a_capacity(decode: WorkerWindow, itl_slo_s: float, words: str) -> None:
    found = of_pair(prefill_worker(9000, 9.0), decode, itl_slo_s)
    assert found.is_capacity
    assert found.decode is not None
    assert words in found.decode.words


def test_a_decode_worker_that_is_busy_with_a_small_batch_is_no_capacity() -> None:
    found = of_pair(prefill_worker(9000, 9.0), decode_worker(1000, 10.0, 1000))
    assert found.decode is not None
    assert found.decode.busy_share == 1
    assert not found.decode.is_capacity
    assert "prefill holds decode back" in found.notes[0]


def test_prompts_that_wait_make_prefill_a_capacity() -> None:
    looks = [look(prefill=(index * 100, index * 0.5), waiting=1) for index in range(11)]
    found = measured([worker_window("p", Role.PREFILL, looks)], NOBODY, 10.0)
    assert found.prefill is not None
    assert found.prefill.is_capacity
    assert found.decode is None


def test_several_instances_give_their_mean() -> None:
    found = measured([prefill_worker(1000, 1.0), prefill_worker(1000, 3.0)], NOBODY, 10.0)
    assert found.prefill is not None
    assert (found.prefill.num_workers, found.prefill.tokens_per_s, found.prefill.busy_share) == (2, 500, 0.2)


def test_a_worker_whose_steps_do_both_is_left_out_and_named() -> None:
    both = worker_window("c", Role.BOTH, [look(), look(prefill=(1000, 1), decode=(500, 4), mixed_s=2, steps=500)])
    found = measured([both], NOBODY, 10.0)
    assert (found.prefill, found.decode) == (None, None)
    assert "c is left out: 29% of its compute" in found.notes[0]


def test_a_worker_counts_for_the_phase_that_took_most_of_its_time() -> None:
    """A prompt computed where it decodes, or the tail of a moved one, is not what a prefill instance does."""
    decoding = worker_window("d", Role.DECODE, [look(), look(prefill=(64, 0.2), decode=(500, 4), steps=500)])
    found = measured([decoding], NOBODY, 10.0)
    assert found.prefill is None
    assert found.decode is not None


def test_a_restart_in_between_is_not_subtracted_from() -> None:
    with pytest.raises(PlanError, match="p has restarted"):
        worker_window("p", Role.PREFILL, [look(prefill=(100, 1)), look(prefill=(50, 0.5))])


def test_lengths_and_number_of_requests_come_from_the_router() -> None:
    before = {
        ("request_prompt_tokens_sum", ""): 100.0,
        ("request_prompt_tokens_count", ""): 1.0,
        ("request_generated_tokens_sum", ""): 10.0,
    }
    after = {
        ("request_prompt_tokens_sum", ""): 700.0,
        ("request_prompt_tokens_count", ""): 4.0,
        ("request_generated_tokens_sum", ""): 100.0,
    }
    seen = seen_by_router(before, after)
    assert (seen.num_choices, seen.prompt_tokens, seen.output_tokens) == (3, 200, 30)


def test_an_exposition_is_read_and_anything_else_refused() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    from pd_serve.observe import Metrics, Side

    metrics = Metrics(CollectorRegistry(), Side.WORKER)
    metrics.record("pd_serve_compute_seconds_total", 1.5, "prefill")
    metrics.record("pd_serve_compute_seconds_total", 0.5, "prefill")
    metrics.record("pd_serve_computed_tokens_total", 42, "decode")
    metrics.record("pd_serve_step_seconds", 0.01)
    metrics.record("pd_serve_blocks", 7, "free")
    metrics.record("pd_serve_waiting_sequences", 2)
    found = read_metrics(generate_latest(metrics.registry).decode())
    assert found[("compute_seconds_total", "prefill")] == 2.0
    assert found[("computed_tokens_total", "decode")] == 42
    assert found[("step_seconds_count", "")] == 1
    assert found[("blocks", "free")] == 7
    assert found[("waiting_sequences", "")] == 2
    with pytest.raises(PlanError, match="no Prometheus text"):
        read_metrics("<html>\n")
    with pytest.raises(PlanError, match="no pd-serve worker"):
        worker_window("x", Role.BOTH, [{}, {}])
