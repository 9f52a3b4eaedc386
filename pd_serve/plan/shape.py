"""What of a model a plan needs: what its KV weighs, and the arithmetic that a prompt takes. From config.json alone; no torch, no weights.

    KV of a token    planes x layers x KV heads x elements x bytes of one      planes: keys and values; with latents (MLA) one, of one head
    FLOP of a token  2 x parameters that take part in it                       of experts only the chosen ones
    and attention    2 x (elements of a query + of a value) x heads, for every pair of tokens of which one sees the other

The second line counts the embedding table too, as published arithmetic does: of a small model with a large vocabulary too much.
Called by the cost of a hand-over, the fit of worker models and the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec

from pd_serve.kv.layout import KVDtype, KVLayout
from pd_serve.kv.routes import rank_heads
from pd_serve.plan.errors import PlanError


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    name: str
    source: str
    """Where the sizes come from: a file, or an address."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Of what is cached: 1 with latents."""
    head_dim: int
    """Elements that are cached per head and plane."""
    num_planes: int
    query_dim: int
    """Elements of a query head where prompts are computed; with latents, of the expanded one."""
    value_dim: int
    layer_windows: tuple[int, ...] = ()
    """By layer, as ModelInfo.layer_windows: keys that a query sees at most; 0: all. Empty: no windows."""
    num_params: int
    num_active_params: int
    """That take part in computing one token."""
    max_len: int
    dtype: str = ""
    notes: tuple[str, ...] = ()
    """What the reader of a plan for this model ought to know."""

    # ---- KV

    def bytes_per_token(self, dtype: KVDtype, has_scales: bool = True) -> int:
        """Over all layers, the whole model. `has_scales` False: fp8 as published tables count it, as half of bf16."""
        return self._bytes(dtype, self.num_kv_heads, has_scales)

    def rank_bytes_per_token(self, dtype: KVDtype, tp: int, has_scales: bool = True) -> int:
        """What each of `tp` ranks holds: with more ranks than KV heads neighbours hold the same one; latents are held by every rank. Raises
        PlanError for a degree that the heads cannot be shared out to."""
        return self._bytes(dtype, self._rank_heads(tp), has_scales)

    def sent_bytes_per_token(self, dtype: KVDtype, decode_tp: int, has_scales: bool = True) -> int:
        """To all ranks of a decode worker together: each gets all that it holds, so what several hold is sent several times."""
        return decode_tp * self.rank_bytes_per_token(dtype, decode_tp, has_scales)

    def seen_tokens(self, num_tokens: int) -> float:
        """Tokens of so long a sequence whose KV the next token looks at, mean of the layers: what a window leaves of it."""
        if not self.layer_windows:
            return float(num_tokens)
        return sum(min(num_tokens, window or num_tokens) for window in self.layer_windows) / self.num_layers

    @property
    def is_windowed(self) -> bool:
        return any(self.layer_windows)

    @property
    def has_latents(self) -> bool:
        return self.num_planes == 1

    def _bytes(self, dtype: KVDtype, num_heads: int, has_scales: bool) -> int:
        layout = KVLayout(self.num_layers, num_heads, self.head_dim, 1, 1, dtype, self.num_planes)
        num_scales = self.num_layers * self.num_planes * num_heads if dtype.has_scales and not has_scales else 0
        return layout.bytes_per_token - num_scales

    def _rank_heads(self, tp: int) -> int:
        if self.num_heads % tp:
            raise PlanError(f"{self.name}: {self.num_heads} attention heads cannot be shared out to {tp} ranks")
        try:
            return len(rank_heads(self.num_kv_heads, tp, 0))
        except ValueError as error:
            raise PlanError(f"{self.name}: {error}") from error

    # ---- arithmetic

    @property
    def flop_per_token(self) -> int:
        return 2 * self.num_active_params

    @cached_property
    def _windows(self) -> Sequence[tuple[int, int]]:
        """(window, layers that have it)."""
        windows = self.layer_windows or (0,) * self.num_layers
        return [(window, windows.count(window)) for window in sorted(set(windows))]

    def attention_flop(self, num_tokens: int, behind: int = 0) -> int:
        """Of a chunk of a prompt whose first `behind` tokens are in the cache: scores and weighted values, causal, within windows."""
        pairs = sum(layers * _num_pairs(num_tokens, behind, window) for window, layers in self._windows)
        return 2 * (self.query_dim + self.value_dim) * self.num_heads * pairs

    def prompt_flop(self, num_tokens: int, behind: int = 0, has_attention: bool = True) -> int:
        """Of a chunk. `has_attention` False: 2 x parameters only, as published tables count it."""
        return self.flop_per_token * num_tokens + (self.attention_flop(num_tokens, behind) if has_attention else 0)


def _num_pairs(num_tokens: int, behind: int, window: int) -> int:
    """Tokens that each of the chunk's sees, itself included: min(position + 1, window), summed up."""
    first, last = behind + 1, behind + num_tokens
    if not window:
        return (first + last) * num_tokens // 2
    num_short = max(0, min(last, window) - first + 1)
    return (2 * first + num_short - 1) * num_short // 2 + window * (num_tokens - num_short)
