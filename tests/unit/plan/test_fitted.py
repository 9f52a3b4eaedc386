"""A fit becomes a worker model for each role."""

from __future__ import annotations

from pathlib import Path

from pd_serve.bench.fit import Fit, WorkerFacts
from pd_serve.bench.fit_samples import StepTimes
from pd_serve.bench.least_squares import Fitted
from pd_serve.plan.fitted import worker_models, write_models
from pd_serve.plan.worker_model import WorkerModel
from pd_serve.protocol.link import Role


def times(*coefficients: float) -> StepTimes:
    return StepTimes(Fitted(coefficients, 0.99, 0.1), (0.9, 1.0, 1.2), (("a case", 1.0, 1.0),))


FIT = Fit(
    model="tiny",
    prompts=times(0.03, 2e-4, 1e-8),
    steps=times(0.02, 1e-6, 2e-4),
    handover_s=0.004,
    request_s=0.006,
    bandwidth_bytes_per_s=2e9,
    workers=(WorkerFacts(Role.PREFILL, 1, 20_000, 23_040, 30, 512, 256), WorkerFacts(Role.DECODE, 2, 10_000, 23_040, 30, 2048, 64)),
)


def test_each_role_has_a_model_with_its_own_pool_and_limits(tmp_path: Path) -> None:
    models = worker_models(FIT)
    assert models["prefill"].prefill == models["decode"].prefill == (0.03, 2e-4, 1e-8)
    assert models["decode"].decode == (0.02, 1e-6, 2e-4)
    assert (models["decode"].num_gpus, models["decode"].num_kv_tokens, models["decode"].max_running) == (2, 10_000, 64)
    assert models["prefill"].max_batch_tokens == 512
    assert models["prefill"].prefill_noise == (0.9, 1.0, 1.2)
    paths = write_models(models, tmp_path, "fit-x")
    assert [path.name for path in paths] == ["fit-x.prefill.json", "fit-x.decode.json"]
    assert WorkerModel.read(paths[1]) == models["decode"]
