"""Ranks of one model in processes of their own: the test's process is rank 0, the others follow it batch by batch.

Started once and used for every degree and model: a process takes seconds to import torch.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pd_serve.clock import VirtualClock
from pd_serve.config import Config
from pd_serve.engine.batch import Batch, StepResult
from pd_serve.engine.loader import EnginePlan, load_runner, plan_engine
from pd_serve.engine.parallel import Collective, open_group
from pd_serve.engine.runner import ModelRunner

CPU = torch.device("cpu")
DEADLINE_S = 120.0
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Join:
    folder: Path
    config: Config
    rendezvous: str
    num_ranks: int
    timeout_s: float


@dataclass(frozen=True)
class Execute:
    batch: Batch
    spoils: bool = False
    """Overwrite every layer's KV as soon as it is written."""


@dataclass(frozen=True)
class ReadCache:
    pass


@dataclass(frozen=True)
class Leave:
    pass


@dataclass
class Rank:
    """One rank, in whatever process."""

    join: Join
    rank: int
    group: Collective = field(init=False)
    plan: EnginePlan = field(init=False)
    runner: ModelRunner[Any] = field(init=False)

    def __post_init__(self) -> None:
        join = self.join
        self.group = open_group(self.rank, join.num_ranks, join.rendezvous, CPU, join.timeout_s)
        self.plan = plan_engine(join.folder, join.config, self.group)
        self.runner = load_runner(self.plan, None, VirtualClock(), group=self.group)

    def execute(self, command: Execute) -> tuple[StepResult, list[tuple[int, tuple[bool, ...]]]]:
        """The result, and at every call of on_layer: its layer, and which layers then hold KV of the batch's last token."""
        cache, entry = self.runner.cache, command.batch.entries[-1]
        position = entry.start + len(entry.token_ids) - 1
        slot = entry.block_table[position // cache.layout.block_size] * cache.layout.block_size + position % cache.layout.block_size
        rows = cache.rows(torch.tensor([slot]))
        calls: list[tuple[int, tuple[bool, ...]]] = []

        def on_layer(layer: int) -> None:
            calls.append((layer, tuple(bool(cache.read(index, rows).any()) for index in range(cache.layout.num_layers))))
            if command.spoils:
                cache.layer(layer).slab.fill_(3.0)

        return self.runner.execute(command.batch, on_layer), calls

    def kv(self) -> npt.NDArray[np.float32]:
        """[num_layers, num_blocks, 2, block_size, num_kv_heads, head_dim]"""
        cache = self.runner.cache
        return torch.stack([cache.layer(index).slab for index in range(cache.layout.num_layers)]).numpy()


class Ranks:
    """A degree's ranks with one model. `leader` is rank 0, here."""

    def __init__(self, leader: Rank, followers: Sequence[Connection]) -> None:
        self.leader = leader
        self._followers = followers
        self.calls: list[list[tuple[int, tuple[bool, ...]]]] = []
        """Of the last step, by rank."""

    def execute(self, batch: Batch, spoils: bool = False) -> StepResult:
        """Raises AssertionError where a follower's result has tokens."""
        _send(self._followers, Execute(batch, spoils))
        result, calls = self.leader.execute(Execute(batch))
        replies = [_receive(follower) for follower in self._followers]
        assert all(reply[0].sampled == () and reply[0].step_id == batch.step_id for reply in replies)
        self.calls = [calls, *(reply[1] for reply in replies)]
        return result

    def kv(self) -> list[npt.NDArray[np.float32]]:
        """By rank, as Rank.kv."""
        _send(self._followers, ReadCache())
        return [self.leader.kv(), *(_receive(follower) for follower in self._followers)]

    def leave(self) -> None:
        """Followers close their groups, without a word to the leader."""
        _send(self._followers, Leave())
        for follower in self._followers:
            _receive(follower)


class RankProcesses:
    def __init__(self, num_followers: int, folder: Path) -> None:
        """`folder`: for the places where ranks meet."""
        self._folder = folder
        self._num_groups = 0
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(num_followers)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [context.Process(target=_follow, args=(rank, theirs)) for rank, (_, theirs) in enumerate(pipes, start=1)]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    @contextmanager
    def joined(self, folder: Path, config: Config, timeout_s: float = TIMEOUT_S) -> Iterator[Ranks]:
        """engine.tp ranks that have loaded the model."""
        self._num_groups += 1
        rendezvous = f"file://{self._folder}/group-{self._num_groups}"
        join = Join(folder, config, rendezvous, config.engine.tp, timeout_s)
        followers = self._connections[: config.engine.tp - 1]
        _send(followers, join)
        leader = Rank(join, 0)
        ranks = Ranks(leader, followers)
        try:
            for follower in followers:
                _receive(follower)
            yield ranks
        finally:
            leader.group.close()
            ranks.leave()

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(DEADLINE_S)
            if process.exitcode is None:
                process.kill()
                process.join()
            process.close()


def _send(followers: Sequence[Connection], message: object) -> None:
    for follower in followers:
        follower.send(message)


def _receive(follower: Connection) -> Any:
    """Raises AssertionError with a follower's traceback."""
    if not follower.poll(DEADLINE_S):
        raise AssertionError("a rank does not answer")
    is_ok, reply = follower.recv()
    assert is_ok, reply
    return reply


def _follow(rank: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    state: Rank | None = None
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        try:
            if isinstance(message, Join):
                state = Rank(message, rank)
                reply: object = None
            else:
                assert state is not None
                reply = _answers(state)[type(message)](message)
        except Exception:  # noqa: BLE001 - the root of the process: the test is told
            connection.send((False, f"rank {rank}: {traceback.format_exc()}"))
        else:
            connection.send((True, reply))


def _answers(state: Rank) -> dict[type, Callable[[Any], object]]:
    return {Execute: state.execute, ReadCache: lambda _: state.kv(), Leave: lambda _: state.group.close()}
