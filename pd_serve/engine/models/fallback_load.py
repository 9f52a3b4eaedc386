"""Loading a model through transformers, and trying it out: what it computes over our pool must be what it computes by itself.

The trial is what makes the fallback safe for models that nobody here has read: positions taken from a mask, biases of scores, state kept
between calls, or attention among all tokens of a step would all show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from pd_serve.engine.attention.base import FULL, AttentionBackend, AttentionGeometry
from pd_serve.engine.attention.registry import attention_for
from pd_serve.engine.batch import BatchEntry, Phase, SampleSpec
from pd_serve.engine.families.fallback import FallbackInfo, one_line
from pd_serve.engine.kv_cache import PagedCache, open_kv_cache
from pd_serve.engine.models.fallback import FallbackModel
from pd_serve.engine.models.fallback_linear import pack_linears
from pd_serve.engine.models.settings import BuildSettings
from pd_serve.engine.step_inputs import build_step_inputs
from pd_serve.engine.weights import RandomWeights, WeightSource
from pd_serve.errors import ConfigError, ModelError
from pd_serve.ids import AttemptId
from pd_serve.kv.layout import KVDtype, KVLayout
from pd_serve.protocol.sampling import SamplingParams

_TRIAL_LENGTHS = (7, 4)
"""Tokens of the trial's prompts."""
_TOLERANCES = {torch.float32: 1e-3}
_TOLERANCE_OF_16_BITS = 0.1
"""Of the largest logit."""


def build_fallback(info: FallbackInfo, weights: WeightSource, settings: BuildSettings) -> tuple[FallbackModel[Any], AttentionBackend[Any]]:
    """Raises ModelError where transformers cannot load the model or our attention does not do for it."""
    if settings.group.num_ranks > 1:
        raise ConfigError(f"engine.tp must be 1 for {info.architecture}: it is run by transformers' own classes")
    geometry = AttentionGeometry(
        num_heads=info.num_heads,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        block_size=settings.block_size,
        max_len=settings.max_len,
        softcap=info.softcap,
        windows=tuple(sorted(set(info.layer_windows))) or (FULL,),
    )
    attention = attention_for(geometry, settings.dtype, settings.device)
    model = _load(info, weights, settings)
    if not model._supports_attention_backend or model._is_stateful:
        raise ModelError(f"{info.architecture} does not attend through transformers' attention interface: not supported")
    expected = _by_itself(model, _trial_tokens(info))
    fallback = FallbackModel(info, model, attention)
    if settings.device.type == "cpu":
        pack_linears(model, fallback.counts)
    _check(_over_pool(fallback, settings, _trial_tokens(info)), expected, info.architecture)
    return fallback, attention


def _load(info: FallbackInfo, weights: WeightSource, settings: BuildSettings) -> PreTrainedModel:
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        if isinstance(weights, RandomWeights):
            config = AutoConfig.from_pretrained(info.folder, trust_remote_code=False)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=settings.dtype, attn_implementation="eager"
            )
            for name, parameter in model.named_parameters():
                parameter.data.copy_(weights.get(name, tuple(parameter.shape)))
        else:
            model = _from_folder(info.folder, settings)
    except (ValueError, KeyError, RuntimeError, OSError, ImportError) as error:
        raise ModelError(f"{info.folder}: transformers cannot load {info.architecture}: {one_line(error)}") from error
    model.train(False)
    model.to(settings.device)  # type: ignore[arg-type]
    return model


def _from_folder(folder: Path, settings: BuildSettings) -> PreTrainedModel:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=settings.dtype, attn_implementation="eager", trust_remote_code=False, output_loading_info=True
    )
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise ModelError(f"{folder} has no tensor {missing[0]}")
    return model


def _trial_tokens(info: FallbackInfo) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(info.vocab_size, (length + 1,), generator=generator).tolist() for length in _TRIAL_LENGTHS]


def _by_itself(model: PreTrainedModel, prompts: list[list[int]]) -> Tensor:
    """[2 * num_prompts, vocab_size]: logits behind all but the last token of each prompt, then behind all."""
    device = model.device
    logits = [model(input_ids=torch.tensor([prompt], device=device), use_cache=False).logits[0] for prompt in prompts]
    return torch.stack([*(rows[-2] for rows in logits), *(rows[-1] for rows in logits)])


def _over_pool(model: FallbackModel[Any], settings: BuildSettings, prompts: list[list[int]]) -> Tensor:
    """The same through a pool of our own: the prompts side by side in one step, then their last tokens."""
    info = model.info
    num_blocks = [-(-len(prompt) // settings.block_size) for prompt in prompts]
    layout = KVLayout(
        num_layers=info.num_layers,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        block_size=settings.block_size,
        num_blocks=sum(num_blocks),
        dtype=KVDtype(str(settings.dtype).removeprefix("torch.")),
    )
    cache = open_kv_cache(layout, None, settings.device, settings.dtype)
    tables = [tuple(range(sum(num_blocks[:index]), sum(num_blocks[: index + 1]))) for index in range(len(prompts))]
    parts = []
    for phase, pieces in (
        (Phase.PREFILL, [(0, prompt[:-1]) for prompt in prompts]),
        (Phase.DECODE, [(len(p) - 1, p[-1:]) for p in prompts]),
    ):
        entries = [
            BatchEntry(AttemptId(index), phase, tuple(tokens), start, tables[index], SampleSpec(SamplingParams(max_tokens=1), start + 1, 0))
            for index, (start, tokens) in enumerate(pieces)
        ]
        parts.append(_step(model, cache, entries, settings))
    return torch.cat(parts)


def _step(model: FallbackModel[Any], cache: PagedCache, entries: list[BatchEntry], settings: BuildSettings) -> Tensor:
    """Logits by entry."""
    inputs = build_step_inputs(entries, settings.block_size, settings.device)
    logits = model.forward(inputs, cache, model.attention.plan(inputs.spans), None)
    order = torch.tensor(inputs.sampled_entries, device=logits.device).argsort()
    return logits[order]


def _check(found: Tensor, expected: Tensor, architecture: str) -> None:
    largest = expected.float().abs().max()
    error = (found.float() - expected.float()).abs().max()
    tolerance = _TOLERANCES.get(expected.dtype, _TOLERANCE_OF_16_BITS)
    if not error <= tolerance * largest:
        raise ModelError(
            f"{architecture}: over paged KV its logits are off by {float(error / largest):.2%}: its attention is not supported"
        )
