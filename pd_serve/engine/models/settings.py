"""How a model is built, whatever its family."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pd_serve.engine.attention.base import ANY_LATENTS, LatentSettings
from pd_serve.engine.native.operators import Operators
from pd_serve.engine.parallel import Collective
from pd_serve.engine.parallel_shares import Share


@dataclass(frozen=True, slots=True)
class BuildSettings:
    block_size: int
    max_len: int
    """Longest prompt + output, tokens."""
    dtype: torch.dtype
    device: torch.device
    group: Collective
    """The ranks among which the model is shared out."""
    latents: LatentSettings = ANY_LATENTS
    operators: Operators | None = None
    """Compiled ones, for this head size and type; None: torch's."""

    @property
    def share(self) -> Share:
        return Share(self.group.rank, self.group.num_ranks)
