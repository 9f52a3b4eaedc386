"""What fp8 KV costs in quality and saves in bytes, on the demo model in bfloat16.

    python -m tests.bench.fp8_report [--tokens 64] [--out FILE]

Every prompt is answered greedily over a bfloat16 pool; then over an fp8 pool twice: given the same tokens, to compare logits position by
position, and on its own, to see how long the answers stay the same. Bytes are those that the transfer plans would move.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoTokenizer

from pd_serve.clock import MonotonicClock
from pd_serve.config import Config, EngineConfig, KVConfig, ModelConfig
from pd_serve.engine.batch import BatchEntry, Phase, SampleSpec
from pd_serve.engine.loader import load_runner, plan_engine
from pd_serve.engine.runner import ModelRunner
from pd_serve.engine.step_inputs import build_step_inputs
from pd_serve.ids import AttemptId
from pd_serve.kv.layout import KVLayout
from pd_serve.kv.transfer import plan_ranges
from pd_serve.model_store import resolve_model
from pd_serve.protocol.sampling import SamplingParams

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "What is 12 + 30?",
    "Explain in one sentence why the sky is blue.",
    "List three uses of copper wire, one per line.",
    "Translate 'good morning' to Spanish.",
    "Who wrote Hamlet?",
    "Give me a short Python function that reverses a string.",
    "What do bees do in winter?",
    "Name the planets in order of their distance from the sun.",
    "Summarize the plot of Romeo and Juliet in two sentences.",
    "How do I boil an egg?",
    "What is the difference between a virus and a bacterium?",
    "Write a polite email asking for a day off.",
    "Why is the ocean salty?",
    "Tell me a joke about computers.",
)
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass
class Answers:
    tokens: list[list[int]]
    """Chosen at each position, [num_prompts][num_tokens]."""
    logits: Tensor
    """[num_prompts, num_tokens, vocab_size]"""


def make_runner(folder: Path, kv_dtype: str) -> ModelRunner[Any]:
    config = Config(
        model=ModelConfig.model_validate({"dtype": "bfloat16"}),
        kv=KVConfig.model_validate({"dtype": kv_dtype, "num_blocks": 512, "block_size": 16}),
        engine=EngineConfig.model_validate({"device": "cpu"}),
    )
    return load_runner(plan_engine(folder, config), None, MonotonicClock())


def answer(runner: ModelRunner[Any], prompts: Sequence[Sequence[int]], num_tokens: int, forced: Sequence[Sequence[int]] | None) -> Answers:
    """Greedily, or along `forced` answers."""
    layout = runner.cache.layout
    tables, next_block = [], 0
    for prompt in prompts:
        count = layout.num_blocks_for(len(prompt) + num_tokens)
        tables.append(tuple(range(next_block, next_block + count)))
        next_block += count
    chosen: list[list[int]] = [[] for _ in prompts]
    kept: list[Tensor] = []
    for position in range(num_tokens):
        entries = []
        for index, prompt in enumerate(prompts):
            known = [*prompt, *(chosen[index] if forced is None else forced[index][:position])]
            start = 0 if position == 0 else len(known) - 1
            phase = Phase.PREFILL if position == 0 else Phase.DECODE
            sample = SampleSpec(_GREEDY, len(known), position)
            entries.append(BatchEntry(AttemptId(index), phase, tuple(known[start:]), start, tables[index], sample))
        inputs = build_step_inputs(entries, layout.block_size, torch.device("cpu"))
        with torch.inference_mode():
            logits = runner.forward(inputs)[torch.tensor(inputs.sampled_entries).argsort()]
        kept.append(logits.clone())
        for index, token in enumerate(logits.argmax(-1).tolist()):
            chosen[index].append(token)
    return Answers(chosen, torch.stack(kept, 1))


def wire_nbytes(layout: KVLayout, num_tokens: int) -> float:
    """Per token, of a prompt that goes to an equal pool."""
    blocks = tuple(range(layout.num_blocks_for(num_tokens)))
    return float(plan_ranges(layout, blocks, blocks, 0, num_tokens)[:, 2].sum()) * layout.num_layers / num_tokens


def compare(base: Answers, forced: Answers, free: Answers) -> dict[str, float]:
    expected, found = base.logits.double(), forced.logits.double()
    error = (found - expected).abs()
    divergence = torch.nn.functional.kl_div(found.log_softmax(-1), expected.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    same = torch.tensor(base.tokens) == torch.tensor(free.tokens)
    prefix = same.int().cumprod(1).sum(1).double()
    return {
        "logit_error_max": float(error.max()),
        "logit_error_mean": float(error.mean()),
        "logit_range": float(expected.amax() - expected.amin()),
        "kl_mean": float(divergence.mean()),
        "kl_max": float(divergence.max()),
        "same_choice_share": float((expected.argmax(-1) == found.argmax(-1)).double().mean()),
        "equal_answers": int(same.all(1).sum()),
        "equal_prefix_mean": float(prefix.mean()),
        "equal_prefix_median": float(prefix.median()),
    }


def _prompt(tokenizer: Any, question: str) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)["input_ids"]
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    folder = resolve_model("demo")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [_prompt(tokenizer, question) for question in QUESTIONS]
    plain, small = make_runner(folder, "auto"), make_runner(folder, "fp8_e4m3")
    base = answer(plain, prompts, arguments.tokens, None)
    figures = compare(base, answer(small, prompts, arguments.tokens, base.tokens), answer(small, prompts, arguments.tokens, None))
    layouts = {"bfloat16": plain.cache.layout, "fp8": small.cache.layout}
    figures |= {f"pool_bytes_per_token_{name}": layout.bytes_per_token for name, layout in layouts.items()}
    figures |= {f"wire_bytes_per_token_{name}": wire_nbytes(layout, 512) for name, layout in layouts.items()}
    figures["memory_saved_share"] = 1 - small.cache.layout.pool_nbytes / plain.cache.layout.pool_nbytes
    if arguments.out:
        arguments.out.write_text(json.dumps(figures, indent=1))
    table = Table("figure", "value", title=f"fp8 KV against bfloat16: {len(prompts)} prompts, {arguments.tokens} tokens each")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.5g}" if isinstance(value, float) else f"{value:,}")
    Console().print(table)


if __name__ == "__main__":
    main()
