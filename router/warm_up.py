"""Does once what the first request would else be the first to do: tokenize, render the chat template, make text. Takes milliseconds."""

from __future__ import annotations

from pd_serve.errors import PdServeError
from pd_serve.protocol.openai import Message
from router.choice import ChoiceText
from router.tokenizer import TextCodec

_TEXT = "The quick brown fox, 1,234 times: «jumps» over\n\n the lazy dog."


def warm_up(codec: TextCodec) -> None:
    try:
        text = codec.render_chat((Message(role="user", content=_TEXT),), {})
    except PdServeError:
        text = _TEXT  # a model without a template, or one whose template wants other messages
    token_ids = codec.encode(text, add_special_tokens=False)
    codec.decode(token_ids)
    for token_id in token_ids:
        codec.text_bytes(token_id)
        codec.token_bytes(token_id)
    ChoiceText(codec, (), 0)
