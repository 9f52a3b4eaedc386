"""Texts out of JSON may hold halves of characters, `\\ud83d` by itself: no tokenizer takes them, and no answer can carry them."""

from __future__ import annotations


def without_halves(text: str) -> str:
    """Halves that belong together are joined, others become U+FFFD. Costs nothing to speak of where all is ASCII."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
