"""Greedy generation through ModelRunner.execute: prompts in chunks, the later ones beside the decoding of earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pd_serve.engine.batch import Batch, BatchEntry, Phase, SampledToken, SampleSpec, StepResult
from pd_serve.ids import AttemptId
from pd_serve.protocol.sampling import SamplingParams, TokenLogprobs

_PARAMS = SamplingParams(max_tokens=999, temperature=0.0, num_logprobs=3)
_MAX_RUNNING = 3


@dataclass
class _Run:
    attempt_id: AttemptId
    token_ids: list[int]
    num_prompt: int
    block_table: tuple[int, ...]
    num_computed: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def entry(self, chunk: int) -> BatchEntry:
        is_prefill = self.num_computed < self.num_prompt
        end = min(self.num_computed + chunk, self.num_prompt) if is_prefill else self.num_computed + 1
        spec = SampleSpec(_PARAMS, end, end - self.num_prompt) if end >= self.num_prompt else None
        phase = Phase.PREFILL if is_prefill else Phase.DECODE
        return BatchEntry(self.attempt_id, phase, tuple(self.token_ids[self.num_computed : end]), self.num_computed, self.block_table, spec)

    def take(self, token: SampledToken) -> None:
        assert token.logprobs is not None
        self.token_ids.append(token.token_id)
        self.logprobs.append(token.logprobs)


def greedy(
    execute: Callable[[Batch], StepResult], prompts: Sequence[tuple[int, ...]], num_tokens: int, *, chunk: int, block_size: int
) -> list[tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]]:
    """Of every prompt the generated tokens and their log-probabilities."""
    runs: list[_Run] = []
    for index, prompt in enumerate(prompts):
        first = runs[-1].block_table[-1] + 1 if runs else 0
        count = -(-(len(prompt) + num_tokens) // block_size)
        runs.append(_Run(AttemptId(index), list(prompt), len(prompt), tuple(range(first, first + count))))
    step_id = 0
    while unfinished := [run for run in runs if len(run.logprobs) < num_tokens][:_MAX_RUNNING]:
        decoding = [run for run in unfinished if run.num_computed >= run.num_prompt]
        prefilling = [run for run in unfinished if run.num_computed < run.num_prompt][:1]
        stepped = {run.attempt_id: (run, run.entry(chunk)) for run in decoding + prefilling}
        result = execute(Batch(step_id, tuple(entry for _, entry in stepped.values())))
        step_id += 1
        for run, entry in stepped.values():
            run.num_computed += len(entry.token_ids)
        for token in result.sampled:
            stepped[token.attempt_id][0].take(token)
    return [(tuple(run.token_ids[run.num_prompt :]), tuple(run.logprobs)) for run in runs]
