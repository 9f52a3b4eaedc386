"""Load for the simulated fleet: conversations of several turns that share a system prompt, and bursts of single prompts."""

from __future__ import annotations

import random

from pd_serve.config import Config
from tests.sim.routing import FleetSpec, Outcome, Prompt, RoutingSim

SYSTEM_TOKENS = 400


def conversations(
    spec: FleetSpec, config: Config, seed: int, number: int = 60, turns: int = 6, per_s: float = 4.0, names_sessions: bool = False
) -> Outcome:
    """So many, begun at random times; each goes on some seconds after an answer, with all that was said before."""
    rng = random.Random(seed)
    left = {f"s{index}": turns - 1 for index in range(number)}

    def follow_up(prompt: Prompt, now: float) -> tuple[float, Prompt] | None:
        if not left[prompt.session]:
            return None
        left[prompt.session] -= 1
        num_tokens = prompt.num_tokens + prompt.num_output + rng.randrange(30, 200)
        return now + rng.uniform(1.0, 6.0), Prompt(prompt.session, num_tokens, SYSTEM_TOKENS, rng.randrange(40, 160))

    sim = RoutingSim(spec, config, follow_up)
    at = 0.0
    for name in left:
        at += rng.expovariate(per_s)
        prompt = Prompt(name, SYSTEM_TOKENS + rng.randrange(100, 1500), SYSTEM_TOKENS, rng.randrange(40, 160))
        sim.submit(at, prompt, name if names_sessions else "")
    return sim.run()


def burst(spec: FleetSpec, config: Config, seed: int, number: int = 200, within_s: float = 0.1) -> Outcome:
    """Prompts of mixed length that have nothing in common."""
    rng = random.Random(seed)
    sim = RoutingSim(spec, config, lambda prompt, now: None)
    for index in range(number):
        sim.submit(rng.uniform(0.0, within_s), Prompt(f"b{index}", rng.choice((20, 100, 500, 1900)), 0, 4))
    return sim.run()


def stream(spec: FleetSpec, config: Config, seed: int, number: int = 400, per_s: float = 20.0) -> Outcome:
    """The same, over a longer time."""
    return burst(spec, config, seed, number, number / per_s)
