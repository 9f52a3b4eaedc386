"""The records of prompts that end with the running step, until the step has ended and their first tokens are known. Used by the transport
thread only."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from pd_serve.engine.batch import StepResult
from pd_serve.protocol.notify import Completed
from workers.events import FlushThenNotify


class StepCompletions:
    """begin -> take, or the next begin where the step failed."""

    def __init__(self) -> None:
        self._commands: tuple[FlushThenNotify, ...] = ()

    def begin(self, commands: tuple[FlushThenNotify, ...]) -> None:
        """Each with a Completed."""
        self._commands = commands

    def take(self, result: StepResult) -> list[FlushThenNotify]:
        """The step has ended well: what is to be carried out now, once. Precondition: each attempt has a sampled token."""
        commands, self._commands = self._commands, ()
        sampled = {token.attempt_id: token for token in result.sampled}
        taken: list[FlushThenNotify] = []
        for command in commands:
            assert isinstance(command.notice, Completed)
            token = sampled[command.notice.attempt_id]
            first = {"first_token": token.token_id, "logprobs": token.logprobs, "is_cut": token.is_cut}
            notice = msgspec.structs.replace(command.notice, **first)
            taken.append(replace(command, notice=notice, compute_ended_at=result.ended_at))
        return taken
