"""Chooses what each step computes: decode tokens first, then prompt chunks, short prompts before long ones (scheduler_prompts.py), within a
token budget.

Pure; owned by the machine on the control thread. One step is in flight at a time:

    schedule(step_id) -> Batch ... complete(StepResult) | abort_step()      then schedule the next

Who holds a sequence's blocks: the scheduler while the sequence is in it; the caller once it has left (remove, preempted, an update
whose has_left is true). The caller gives them back with `release(sequence)`, never to the pool directly: a step in flight may still read
and write them, and then they go back only when that step has ended.

When blocks run out, a decoding sequence preempts younger ones, youngest first, and never an older one: then it skips the step instead. A
prompt that lacks blocks just waits, since other holders (decoding sequences, transfers being flushed) end by themselves; only where nothing
else can move is the youngest preempted for it. So the oldest always gets on.

Blocks into which another worker has yet to write do not come back by themselves: that worker may itself wait for a prompt that is computed
here. So a prompt computed for another worker never waits for such blocks alone: where nothing can move, the youngest of these is preempted.
So each that a worker waits for is computed or given up, and no circle of workers waits for itself. Without such prompts nobody waits for
what is here, and those blocks are waited for as any others.

A moved request comes with what it has generated. That is computed again in the decode phase, as it was at first, some tokens per step:
prefill kernels would round otherwise, and the request would not go on as it would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from pd_serve.engine.batch import Batch, BatchEntry, Phase, StepResult
from pd_serve.engine.scheduler_prompts import PromptQueue
from pd_serve.engine.sequence import Sequence, SequenceKind, StopRules
from pd_serve.ids import AttemptId
from pd_serve.kv.block_pool import BlockPool
from pd_serve.protocol.link import FinishReason, TokenOutput

MAX_REPLAYED_TOKENS = 32
"""Generated tokens of one moved sequence computed again in one step: each gathers its whole context, as a decoding sequence does."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    max_batch_tokens: int
    max_running: int
    """Sequences in one step."""
    prefill_chunk: int
    """Longest chunk, tokens; 0: as the budget allows."""
    eos_token_ids: frozenset[int]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class ScheduleDecision:
    batch: Batch | None
    """None: nothing can be computed now."""
    preempted: tuple[Sequence, ...]
    """Have left the scheduler. Release them; where batch is None, then schedule again."""


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What a step did for one sequence that is, or was until now, in the scheduler."""

    attempt_id: AttemptId
    sequence: Sequence
    token: TokenOutput | None
    """To be emitted; for PREFILL_ONLY the first token, to be recorded. `num_cached_tokens` is set on a LOCAL attempt's first token."""
    finished: FinishReason | None
    """Never set for PREFILL_ONLY: decode judges the first token."""
    prompt_done: bool
    """The prompt's last token was computed in this step."""
    is_cut: bool = False
    """The token ends the answer, which is not whole (SampledToken.is_cut)."""

    @property
    def has_left(self) -> bool:
        """The sequence has left the scheduler; its blocks are the caller's to release."""
        return self.finished is not None or (self.prompt_done and self.sequence.kind is SequenceKind.PREFILL_ONLY)


class Scheduler:
    def __init__(self, settings: SchedulerSettings, pool: BlockPool, awaited_blocks: Callable[[], Iterable[int]] = tuple) -> None:
        """`awaited_blocks`: those into which other workers have yet to write."""
        self.rules = StopRules(settings.eos_token_ids, settings.max_model_len)
        self._settings = settings
        self._pool = pool
        self._awaited_blocks = awaited_blocks
        self._prompts: PromptQueue[Sequence] = PromptQueue(pool.block_size)
        self._decoding: dict[AttemptId, Sequence] = {}
        self._received: dict[AttemptId, Sequence] = {}
        """Decoding; what came of them from elsewhere is not published yet: hashing it would delay their first step."""
        self._next_order = 0
        self._in_flight: dict[AttemptId, tuple[Sequence, BatchEntry]] = {}
        self._step_id: int | None = None
        self._deferred: list[int] = []
        """Blocks of sequences that left during the step in flight: returned when it has ended."""

    # ---- sequences

    def __len__(self) -> int:
        return len(self._prompts) + len(self._decoding)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._decoding.values()
        yield from self._prompts

    def get(self, attempt_id: AttemptId) -> Sequence | None:
        return self._decoding.get(attempt_id) or self._prompts.get(attempt_id)

    def add(self, sequence: Sequence) -> None:
        """Take over a sequence and the references to its blocks. A DECODE sequence comes with its first token appended and not finished;
        its received full blocks are published before they are missed (publish_received). Precondition: the attempt is not here already."""
        assert self.get(sequence.attempt_id) is None, f"attempt {sequence.attempt_id} added twice"
        sequence.order = self._next_order
        self._next_order += 1
        if sequence.prompt_done:
            assert sequence.num_uncomputed_tokens == 1
            self._received[sequence.attempt_id] = sequence
            self._decoding[sequence.attempt_id] = sequence
        else:
            assert sequence.num_uncomputed_tokens >= 1
            self._prompts.add(sequence)

    def remove(self, attempt_id: AttemptId) -> Sequence | None:
        """Take a sequence out, also while its step is in flight (its result is then ignored). The caller releases it."""
        if attempt_id in self._received:
            self.publish_received()
        return self._decoding.pop(attempt_id, None) or self._prompts.pop(attempt_id)

    def publish_received(self) -> None:
        """Call before the prefix cache is asked for something."""
        for sequence in self._received.values():
            self._pool.publish(sequence.token_ids, sequence.block_table, sequence.num_computed_tokens)
        self._received.clear()

    def release(self, sequence: Sequence) -> None:
        """Give back the blocks of a sequence that has left: at once, or when the step in flight that uses them has ended. Idempotent."""
        blocks, sequence.block_table = sequence.block_table, []
        if sequence.attempt_id in self._in_flight:
            self._deferred.extend(blocks)
        else:
            self._pool.release(blocks)

    # ---- steps

    @property
    def step_in_flight(self) -> bool:
        return self._step_id is not None

    def is_in_flight(self, attempt_id: AttemptId) -> bool:
        """The step in flight computes for this attempt, so its blocks may be read and written."""
        return attempt_id in self._in_flight

    def schedule(self, step_id: int) -> ScheduleDecision:
        """Compose the next step. Precondition: none is in flight."""
        assert not self.step_in_flight
        plan = _StepPlan(self._settings)
        for sequence in sorted(self._decoding.values(), key=_order):
            if not plan.has_room:
                break
            if sequence.attempt_id not in self._decoding:
                continue
            if self._grow(sequence, len(sequence.token_ids), plan):
                plan.add(sequence, Phase.DECODE, 1)
            else:
                self._preempt_for(sequence, plan)
        for sequence, count in self._prompts.share_out(plan.room, plan.num_free_entries, plan.longest_chunk):
            if self._grow(sequence, sequence.num_computed_tokens + count, plan):
                plan.add(sequence, _phase_of(sequence), count)
        if not plan.entries and not plan.preempted and plan.num_lacking:
            self._preempt_last_resort(plan)
        return self._decide(step_id, plan)

    def complete(self, result: StepResult) -> tuple[SequenceUpdate, ...]:
        """Apply a step's result, in entry order, leaving out sequences removed meanwhile. Precondition: it is the step in flight."""
        assert result.step_id == self._step_id, f"step {result.step_id} ended, {self._step_id} is in flight"
        sampled = {item.attempt_id: item for item in result.sampled}
        block_size = self._pool.block_size
        updates: list[SequenceUpdate] = []
        for attempt_id, (sequence, entry) in self._in_flight.items():
            if self.get(attempt_id) is not sequence:
                continue
            if sequence.prompt_done:
                sequence.num_computed_tokens += len(entry.token_ids)
            else:
                self._prompts.advance(sequence, len(entry.token_ids))
            is_new = self._received.pop(attempt_id, None) is not None
            if is_new or sequence.num_computed_tokens // block_size > entry.start // block_size:
                self._pool.publish(sequence.token_ids, sequence.block_table, sequence.num_computed_tokens)
            token: TokenOutput | None = None
            finished: FinishReason | None = None
            is_cut = False
            prompt_done = entry.sample is not None and not sequence.prompt_done
            if prompt_done:
                self._prompts.pop(attempt_id)
            if entry.sample is not None:
                item = sampled[attempt_id]
                finished = sequence.append(item.token_id, self.rules)
                is_cut = item.is_cut
                if is_cut:
                    finished = FinishReason.LENGTH
                if sequence.kind is SequenceKind.PREFILL_ONLY:
                    finished = None
                num_cached = -1 if sequence.prompt_done else sequence.num_cached_tokens
                token = TokenOutput(attempt_id, item.token_id, finished, item.logprobs, num_cached)
            update = SequenceUpdate(attempt_id, sequence, token, finished, prompt_done, is_cut)
            self._move_on(update)
            updates.append(update)
        self._end_step()
        return tuple(updates)

    def abort_step(self) -> tuple[Sequence, ...]:
        """The step in flight failed: its sequences leave, and are the caller's to fail and release."""
        assert self.step_in_flight
        failed = [sequence for attempt_id, (sequence, _) in self._in_flight.items() if self.get(attempt_id) is sequence]
        for sequence in failed:
            self.remove(sequence.attempt_id)
        self._end_step()
        return tuple(failed)

    # ---- load

    @property
    def num_running(self) -> int:
        """Sequences that have begun to compute."""
        return len(self._decoding) + self._prompts.num_begun

    @property
    def num_waiting(self) -> int:
        return len(self) - self.num_running

    @property
    def prefill_queue_tokens(self) -> int:
        """Prompt tokens accepted and not yet computed."""
        return self._prompts.num_tokens

    @property
    def decode_context_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self._decoding.values())

    def headroom_blocks(self, headroom_tokens: int) -> int:
        """Blocks that the sequences here may still take for `headroom_tokens` more output each (less where they end sooner)."""
        total = 0
        for sequence in self:
            if sequence.kind is SequenceKind.PREFILL_ONLY:
                length = sequence.num_initial_tokens
            else:
                length = min(len(sequence.token_ids) + headroom_tokens, sequence.max_total_tokens(self.rules))
            total += max(0, self._pool.num_blocks_for(length) - len(sequence.block_table))
        return total

    # ---- inside

    def _move_on(self, update: SequenceUpdate) -> None:
        """Into the phase that follows, or out. Precondition: a prompt that is done has left the prompts."""
        sequence = update.sequence
        if update.prompt_done:
            sequence.prompt_done = True
            if not update.has_left:
                self._decoding[sequence.attempt_id] = sequence
        elif update.has_left:
            del self._decoding[sequence.attempt_id]

    def _end_step(self) -> None:
        self._step_id = None
        self._in_flight.clear()
        self._pool.release(self._deferred)
        self._deferred.clear()

    def _grow(self, sequence: Sequence, num_tokens: int, plan: _StepPlan) -> bool:
        """Make the block table hold `num_tokens`. False: it must wait, and so must younger ones that need blocks."""
        missing = self._pool.num_blocks_for(num_tokens) - len(sequence.block_table)
        if missing <= 0:
            return True
        if plan.num_lacking or missing > self._pool.num_allocatable:
            plan.num_lacking += missing
            return False
        last = sequence.block_table[-1] if sequence.block_table else None
        sequence.block_table.extend(self._pool.allocate(missing, after=last))
        return True

    def _preempt_for(self, sequence: Sequence, plan: _StepPlan) -> None:
        """Preempt sequences younger than a decoding one until the blocks lacking so far are there or promised."""
        candidates = [s for s in self if s.order > sequence.order and s.block_table and not plan.includes(s)]
        candidates.sort(key=_order)
        while candidates and self._pool.num_allocatable + plan.num_promised < plan.num_lacking:
            self._preempt(candidates.pop(), plan)

    def _preempt_last_resort(self, plan: _StepPlan) -> None:
        """Nothing can move. Unless others hold blocks as well, and will return them whatever happens here, the youngest has to go."""
        own = {block for sequence in self for block in sequence.block_table}
        num_others = self._pool.counts().held - len(own)
        if not num_others:
            self._preempt(max(self, key=lambda s: (bool(s.block_table), s.order)), plan)
            return
        for_others = [sequence for sequence in self if sequence.kind is SequenceKind.PREFILL_ONLY]
        if for_others and num_others == len(set(self._awaited_blocks()) - own):
            self._preempt(max(for_others, key=_order), plan)

    def _preempt(self, victim: Sequence, plan: _StepPlan) -> None:
        self.remove(victim.attempt_id)
        plan.preempted.append(victim)
        plan.num_promised += sum(1 for block in victim.block_table if self._pool.ref_count(block) == 1)

    def _decide(self, step_id: int, plan: _StepPlan) -> ScheduleDecision:
        preempted = tuple(plan.preempted)
        if not plan.entries:
            return ScheduleDecision(None, preempted)
        self._step_id = step_id
        for sequence, entry in plan.entries:
            self._in_flight[sequence.attempt_id] = (sequence, entry)
        has_push = any(sequence.kind is SequenceKind.PREFILL_ONLY for sequence, _ in plan.entries)
        return ScheduleDecision(Batch(step_id, tuple(entry for _, entry in plan.entries), has_push), preempted)


class _StepPlan:
    """A step being composed."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.entries: list[tuple[Sequence, BatchEntry]] = []
        self.preempted: list[Sequence] = []
        self.num_promised = 0
        """Blocks that the preempted will give back once released."""
        self.num_lacking = 0
        """Blocks that sequences which skip this step lack."""
        self._budget = settings.max_batch_tokens
        self._max_running = settings.max_running
        self._chunk = settings.prefill_chunk or settings.max_batch_tokens
        self._included: set[AttemptId] = set()

    @property
    def room(self) -> int:
        """Tokens."""
        return self._budget

    @property
    def num_free_entries(self) -> int:
        return self._max_running - len(self.entries)

    @property
    def has_room(self) -> bool:
        return self._budget > 0 and self.num_free_entries > 0

    def includes(self, sequence: Sequence) -> bool:
        return sequence.attempt_id in self._included

    def longest_chunk(self, sequence: Sequence) -> int:
        """Most tokens of a sequence that does not decode yet that the step can compute: of its prompt, or of what earlier attempts
        generated."""
        limit = min(self._budget, self._chunk)
        if _phase_of(sequence) is Phase.PREFILL:
            return min(sequence.num_prompt_tokens - sequence.num_computed_tokens, limit)
        return min(sequence.num_uncomputed_tokens, limit, MAX_REPLAYED_TOKENS)

    def add(self, sequence: Sequence, phase: Phase, count: int) -> None:
        start = sequence.num_computed_tokens
        is_last = start + count == len(sequence.token_ids)
        entry = BatchEntry(
            attempt_id=sequence.attempt_id,
            phase=phase,
            token_ids=tuple(sequence.token_ids[start : start + count]),
            start=start,
            block_table=tuple(sequence.block_table),
            sample=sequence.sample_spec() if is_last else None,
        )
        self.entries.append((sequence, entry))
        self._included.add(sequence.attempt_id)
        self._budget -= count


def _phase_of(sequence: Sequence) -> Phase:
    """Of the next tokens of a sequence that does not decode yet."""
    return Phase.PREFILL if sequence.num_computed_tokens < sequence.num_prompt_tokens else Phase.DECODE


def _order(sequence: Sequence) -> int:
    return sequence.order
