"""Which model a worker runs, in the parts that a refusal can name. The content itself is PeerInfo.model_fingerprint."""

from __future__ import annotations

import msgspec


class ModelIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of it follows from the checkpoint's files."""

    name: str = ""
    """For people: the same content may go by several names."""
    vocab_size: int = 0
    tokenizer: str = ""
    """Digest of the tokenizer's file; empty where a worker's copy has none, which is no obstacle: workers do not need it."""
    rope: str = ""
    """Rotary embedding that cached keys have been turned by."""

    @property
    def vocabulary(self) -> str:
        return f"{self.vocab_size} tokens ({self.tokenizer or 'no tokenizer'})"

    def has_vocabulary_of(self, other: ModelIdentity) -> bool:
        """Ids mean the same tokens on both, as far as both know."""
        is_unknown = not self.tokenizer or not other.tokenizer
        return self.vocab_size == other.vocab_size and (is_unknown or self.tokenizer == other.tokenizer)
