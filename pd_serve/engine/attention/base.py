"""What attends over the paged KV pool. One implementation per file beside this one; the runner plans once per step, layers only attend.

Every implementation keeps the invariance rules (they make output independent of batch, chunk and block order):
  1. Which kernel a token takes depends on its sequence's phase, never on how many tokens of it are in the step.
  2. The shape a kernel sees depends on a token's absolute position, never on the other sequences or on where a chunk begins.
  3. What lies in the pool beyond a sequence's length has no influence, not even if it is no number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from pd_serve.engine.batch import Phase
from pd_serve.engine.kv_cache import KVLayer

PlanT = TypeVar("PlanT")
PlanT_co = TypeVar("PlanT_co", covariant=True)

FULL = 0
"""As a window: none."""


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    num_heads: int
    """Query heads; each group of num_heads / num_kv_heads of them shares one KV head."""
    num_kv_heads: int
    head_dim: int
    block_size: int
    max_len: int
    query_scale: float | None = None
    """Factor of q·k; None: 1 / sqrt(head_dim)."""
    softcap: float = 0.0
    """Scores are softcap * tanh(score / softcap); 0: as they are (Gemma 2, arXiv:2408.00118, section 2)."""
    windows: tuple[int, ...] = (FULL,)
    """Every window that some layer has."""
    has_sinks: bool = False
    num_planes: int = 2
    """Keys and values; 1: latents, which are keys and values at once (MLA, absorbed)."""
    latent_rank: int = 0
    """With one plane: how many elements of a cached vector, the first ones, are its value; the others are its rotated part."""

    @property
    def scale(self) -> float:
        scale: float = self.head_dim**-0.5 if self.query_scale is None else self.query_scale
        return scale


@dataclass(frozen=True, slots=True)
class LatentSettings:
    """What attends over latents (MLA) on CUDA."""

    backend: str = "auto"
    """As EngineConfig.latent_attention."""
    has_scaled_cache: bool = False
    """The pool's elements are scaled (fp8): no kernel reads them in place."""


ANY_LATENTS = LatentSettings()


@dataclass(frozen=True, slots=True)
class LayerRule:
    """What a layer's queries see, where layers differ in it."""

    window: int = FULL
    """A query sees this many keys at most, its own the last of them; FULL: all of them. One of AttentionGeometry.windows."""
    sinks: Tensor | None = None
    """[num_heads] float32: the score of a key that is always seen and has no value (GPT-OSS)."""


EVERYTHING = LayerRule()


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """One sequence's rows among the tokens of a step."""

    phase: Phase
    first_row: int
    start: int
    """Absolute position of the first query."""
    num_queries: int
    """1 for decode."""
    block_table: tuple[int, ...]

    @property
    def context_len(self) -> int:
        """Keys that the last query sees, itself included."""
        return self.start + self.num_queries


class AttentionBackend(Protocol[PlanT]):
    def plan(self, spans: Sequence[QuerySpan]) -> PlanT:
        """Everything that is the same for all layers of a step. `spans` cover its rows in order: decode first, by growing context."""
        ...

    def attend(self, queries: Tensor, layer: KVLayer, plan: PlanT, rule: LayerRule = EVERYTHING) -> Tensor:
        """Causal attention of `queries` [num_tokens, num_heads, head_dim], rotated, over the sequences' blocks in `layer`, which already
        hold the step's own keys and values, as far as `rule` lets them see.

        Returns [num_tokens, num_heads * head_dim].
        """
        ...


class DecodeBuffers(Protocol[PlanT_co]):
    """A plan of decode rows, one per sequence, in memory that keeps its place: what reads it can be captured once and replayed."""

    def plan(self, num_rows: int) -> PlanT_co:
        """Of the first `num_rows` rows, whatever lies there when it is used."""
        ...

    def fill(self, spans: Sequence[QuerySpan], num_rows: int, idle_block: int) -> None:
        """One query per span; the rows behind them, up to `num_rows`, see the first slot of `idle_block`."""
        ...


class CapturableAttention(AttentionBackend[PlanT], Protocol[PlanT]):
    def decode_buffers(self, max_rows: int, max_len: int) -> DecodeBuffers[PlanT]:
        """`max_len`: longest context in tokens."""
        ...
