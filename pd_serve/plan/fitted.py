"""Worker models from what `bench fit` has measured."""

from __future__ import annotations

from pathlib import Path

from pd_serve.bench.fit import Fit
from pd_serve.plan.worker_model import WorkerModel


def worker_models(fit: Fit) -> dict[str, WorkerModel]:
    """By role (prefill, decode, both). Each has both costs, measured where each is done: workers of the two roles are taken to be alike."""
    prefill, decode = fit.prompts.fitted.coefficients, fit.steps.fitted.coefficients
    return {
        facts.role.value: WorkerModel(
            name=f"{fit.model}, {facts.role.value}, fitted",
            num_gpus=facts.num_gpus,
            prefill=(prefill[0], prefill[1], prefill[2]),
            decode=(decode[0], decode[1], decode[2]),
            prefill_calls=fit.prompts.call_sizes,
            prefill_call_s=prefill[3] if fit.prompts.call_sizes else 0.0,
            num_kv_tokens=facts.num_kv_tokens,
            kv_bytes_per_token=facts.kv_bytes_per_token,
            num_layers=facts.num_layers,
            max_batch_tokens=facts.max_batch_tokens,
            max_running=facts.max_running,
            handover_s=fit.handover_s,
            request_s=fit.request_s,
            prefill_noise=fit.prompts.noise,
            decode_noise=fit.steps.noise,
        )
        for facts in fit.workers
    }


def write_models(models: dict[str, WorkerModel], folder: Path, stem: str) -> tuple[Path, ...]:
    """`STEM.ROLE.json` each. Raises PlanError."""
    paths = []
    for role, model in models.items():
        path = folder / f"{stem}.{role}.json"
        model.write(path)
        paths.append(path)
    return tuple(paths)
