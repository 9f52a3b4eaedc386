"""Whether a worker may join, decided from its Welcome before any request is sent there, and whether its tokens can be told to a client.

Both values are named in every refusal to join.
"""

from __future__ import annotations

from math import inf

from pd_serve.errors import IncompatibleError
from pd_serve.ids import WorkerId
from pd_serve.protocol.exchange import differences
from pd_serve.protocol.link import Load, PeerStatus, PrefillDone, Step, Welcome, WorkerFrame
from pd_serve.wire import PROTOCOL_VERSION

MOST = 1 << 48
"""Of anything that is counted: sums over all workers fit the 64 bits of a column (policy/columns.py)."""


def check_compatible(welcome: Welcome, text_vocab_size: int, reference: Welcome | None, expected_id: WorkerId | None) -> None:
    """`reference` is a worker that has already joined; requests may move from any worker to any other, so all must agree.

    Raises IncompatibleError.
    """
    info = welcome.info
    if expected_id is not None and info.peer.worker_id != expected_id:
        raise IncompatibleError(f"{expected_id} registered this address, but {info.peer.worker_id} answers there")
    _same("protocol version", info.protocol_version, PROTOCOL_VERSION, "this router")
    layout = info.layout
    sizes = (welcome.max_model_len, layout.block_size, layout.num_blocks * layout.block_size, layout.bytes_per_token * info.num_ranks)
    if not all(0 < size < MOST for size in sizes):
        raise IncompatibleError(f"sizes that are impossible: {sizes}, of model length, blocks, pool and KV of a token")
    if welcome.vocab_size < text_vocab_size:
        raise IncompatibleError(f"vocabulary of {welcome.vocab_size} tokens, but the router's tokenizer has {text_vocab_size}")
    if reference is None:
        return
    other = str(reference.info.peer)
    if found := differences(info, reference.info):
        raise IncompatibleError("; ".join(_difference(*difference, other) for difference in found))
    _same("vocabulary size", welcome.vocab_size, reference.vocab_size, other)
    _same("end-of-sequence ids", welcome.eos_token_ids, reference.eos_token_ids, other)


def nonsense_in(frame: WorkerFrame, vocab_size: int) -> str:
    """What in it no worker of that vocabulary can mean; empty when there is nothing. On the path of every token."""
    if isinstance(frame, Step):
        return _nonsense_in_step(frame, vocab_size)
    if isinstance(frame, Load):
        return _nonsense_in_load(frame)
    if isinstance(frame, PrefillDone) and not 0 <= frame.num_computed_tokens < MOST:
        return f"computed {frame.num_computed_tokens} tokens of a prompt"
    if isinstance(frame, PeerStatus) and not all(0 <= state.bandwidth < inf for state in frame.states):
        return "measured a bandwidth that is no number"
    return ""


def _nonsense_in_step(frame: Step, vocab_size: int) -> str:
    for token in frame.outputs:
        if not 0 <= token.token_id < vocab_size:
            return f"sent token {token.token_id}, but has {vocab_size}"
        logprobs = token.logprobs
        if logprobs is None:
            continue
        if len(logprobs.top_ids) != len(logprobs.top) or not all(0 <= token_id < vocab_size for token_id in logprobs.top_ids):
            return "sent log-probabilities of tokens that do not exist"
        if not all(value < inf for value in (logprobs.chosen, *logprobs.top)):
            return "sent log-probabilities that are no numbers"
    return ""


def _nonsense_in_load(load: Load) -> str:
    blocks = load.blocks
    counts = (blocks.total, blocks.free, blocks.cached, load.running, load.waiting, load.prefill_queue_tokens, load.decode_context_tokens)
    if min(counts) >= 0 and max(counts) < MOST:
        return ""
    return "reported a load of which a count is impossible"


def _same(what: str, mine: object, theirs: object, whose: str) -> None:
    if mine != theirs:
        raise IncompatibleError(_difference(what, mine, theirs, whose))


def _difference(what: str, mine: object, theirs: object, whose: str) -> str:
    return f"{what} {mine!r} here, {theirs!r} at {whose}"
