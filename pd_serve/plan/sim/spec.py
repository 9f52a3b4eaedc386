"""What a simulation is of: the workers, what is between them, the router's settings, and what happens to them."""

from __future__ import annotations

from dataclasses import dataclass, field

from pd_serve.config import Config
from pd_serve.plan.errors import PlanError
from pd_serve.plan.sim.network import LinkSpec
from pd_serve.plan.worker_model import WorkerModel
from pd_serve.protocol.link import Role

_NEVER = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Group:
    """Workers that are alike. Role BOTH: colocated."""

    role: Role
    count: int
    model: WorkerModel


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's process ends, and all that it had is lost."""

    at_s: float
    worker: int
    """By its place in the fleet: the first group's first is 0."""
    down_s: float = float("inf")
    """Until it is back, empty, in the role it was started in."""


@dataclass(frozen=True, slots=True)
class Drain:
    """A worker takes nothing new, finishes what it has, gives back what is left at the deadline, and leaves."""

    at_s: float
    worker: int
    deadline_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Retries:
    """What clients do that are turned away: come again when they were told to."""

    max_retries: int = 0
    """Of one request; 0: they give up."""


@dataclass(frozen=True, slots=True)
class FleetSpec:
    groups: tuple[Group, ...]
    link: LinkSpec
    config: Config = field(default_factory=Config)
    """The router's. What it says of engines is taken from the models."""
    cluster_report_s: float = 0.1
    """Between two reports of a worker whose load has changed."""
    failures: tuple[Failure | Drain, ...] = ()
    chunk_budget: int = 0
    """Tokens of a step of colocated workers; 0: as their model says."""
    retries: Retries = Retries()

    @property
    def num_gpus(self) -> int:
        return sum(group.count * group.model.num_gpus for group in self.groups)

    def budget_of(self, group: Group) -> int:
        """Tokens of a step that computes prompts."""
        return self.chunk_budget if group.role is Role.BOTH and self.chunk_budget else group.model.max_batch_tokens

    def places(self) -> tuple[Group, ...]:
        """The group of each worker."""
        return tuple(group for group in self.groups for _ in range(group.count))

    def router_config(self) -> Config:
        """The router's settings as this fleet's operator would have them: steps and batches as the models say. Workers that have nothing
        new to report are not simulated to repeat themselves, so no report is ever missed.
        """
        computing = [group for group in self.groups if group.role is Role.PREFILL] or list(self.groups)
        decoding = [group for group in self.groups if group.role is not Role.PREFILL]
        engine = self.config.engine.model_copy(
            update={
                "max_batch_tokens": min(self.budget_of(group) for group in computing),
                "max_running": min(group.model.max_running for group in decoding),
            }
        )
        routing = self.config.routing.model_copy(update={"stale_reports": _NEVER})
        return self.config.model_copy(update={"engine": engine, "routing": routing})

    def check(self) -> None:
        """Raises PlanError."""
        if not any(group.count > 0 and group.role is not Role.PREFILL for group in self.groups):
            raise PlanError("a fleet has at least one worker that decodes")
        if min(group.count for group in self.groups) < 1:
            raise PlanError("a group has at least one worker")
        if self.link.bytes_per_s <= 0 or self.link.setup_s < 0 or self.cluster_report_s <= 0 or self.chunk_budget < 0:
            raise PlanError(
                "a link has a rate above 0 and no negative set-up time; reports come at intervals above 0; budgets are not negative"
            )
        num_workers = len(self.places())
        for event in self.failures:
            if not 0 <= event.worker < num_workers or event.at_s < 0:
                raise PlanError(f"there is no worker {event.worker} of {num_workers} to fail at {event.at_s:g} s")
