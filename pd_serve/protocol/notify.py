"""Records that workers send each other over the transport, beside the KV. Delivered after the flush of the writes they speak of.

prefill -> decode: Completed, Quiesced.     decode -> prefill: Abandon.

Abandon asks a writer to let go of a lease whatever it knows of it: a writer that never heard of the lease remembers the refusal
(a tombstone) and answers Quiesced as well, so a Prefill frame that arrives later is refused and no write can follow.
"""

from __future__ import annotations

import msgspec

from pd_serve.ids import AttemptId, Epoch, LeaseId
from pd_serve.protocol.sampling import TokenLogprobs
from pd_serve.wire import Codec

MAX_NOTICE_NBYTES = 4096
ALL_CONTRIBUTORS = -1


class Notice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Base of every record."""

    lease_id: LeaseId
    epoch: Epoch


class Completed(Notice, frozen=True, tag="completed"):
    """Every byte of the attempt's KV that this contributor owes has been flushed to the target."""

    attempt_id: AttemptId
    contributor: int
    """Index of the route (kv/routes.py) that was written; a lease is filled when every expected one is complete."""
    num_contributors: int
    first_token: int
    logprobs: TokenLogprobs | None
    num_tokens: int
    """Prompt tokens whose KV decode now has, cached ones included."""
    num_layers: int
    nbytes: int
    """Payload bytes this contributor wrote."""
    num_cached_tokens: int
    """Prompt tokens that prefill did not have to compute."""
    compute_to_notice_s: float
    """From the end of prefill compute to the sending of this record, a duration on the writer's clock."""
    digest: bytes = b""
    """Of the KV this contributor sent (kv/digest.py), where it verifies transfers."""
    is_cut: bool = False
    """The first token is the last, and the answer is not whole (SampledToken.is_cut)."""


class Quiesced(Notice, frozen=True, tag="quiesced"):
    """This contributor has stopped writing under the lease and flushed: no later write can land."""

    contributor: int
    """ALL_CONTRIBUTORS: nobody of the writer has written, or will."""


class Abandon(Notice, frozen=True, tag="abandon"):
    """The lease is dead: stop writing, flush, answer Quiesced."""


NoticeUnion = Completed | Quiesced | Abandon


def notice_codec() -> Codec[NoticeUnion]:
    return Codec(NoticeUnion, MAX_NOTICE_NBYTES)
