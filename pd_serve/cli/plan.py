"""The group `pd-serve plan`: one line per command, each in a file of its own (plan_<name>.py) that imports what it runs when it runs."""

from __future__ import annotations

import typer

from pd_serve.cli import plan_cost, plan_ratio, plan_simulate, plan_validate

plan = typer.Typer(
    name="plan",
    no_args_is_help=True,
    help="Before anything is bought: what moving KV costs, how many workers of each kind, what a load would do to them.",
    epilog="Start here: [bold]pd-serve plan ratio --rate 30 --input 2000 --output 300 --prefill-tokens-per-s 20000 "
    "--decode-tokens-per-s 3000[/bold]. The arithmetic, and a worked example: docs/planning.md.",
)
plan.command(epilog=plan_cost.EPILOG)(plan_cost.cost)
plan.command(epilog=plan_ratio.EPILOG)(plan_ratio.ratio)
plan.command(epilog=plan_simulate.EPILOG)(plan_simulate.simulate)
plan.command(epilog=plan_validate.EPILOG)(plan_validate.validate)
