"""The group `pd-serve bench`: one line per command, each in a file of its own (bench_<name>.py) that imports what it runs when it runs."""

from __future__ import annotations

import typer

from pd_serve.cli import (
    bench_compare,
    bench_engine,
    bench_fit,
    bench_handover,
    bench_interference,
    bench_load,
    bench_report,
    bench_router,
    bench_trace,
    bench_transfer,
)

bench = typer.Typer(
    name="bench",
    no_args_is_help=True,
    help="Measure endpoints, ours or others', as their users would: results as JSON, with a page and pictures.",
    epilog="Start here: [bold]pd-serve bench load --arm ours=1p1d[/bold]. What each figure means: docs/benchmarks.md.",
)
bench.command(epilog=bench_load.EPILOG)(bench_load.load)
bench.command(epilog=bench_trace.EPILOG)(bench_trace.trace)
bench.command(epilog=bench_interference.EPILOG)(bench_interference.interference)
bench.command(epilog=bench_handover.EPILOG)(bench_handover.handover)
bench.command(epilog=bench_router.EPILOG)(bench_router.router)
bench.command(epilog=bench_transfer.EPILOG)(bench_transfer.transfer)
bench.command(epilog=bench_engine.EPILOG)(bench_engine.engine)
bench.command(epilog=bench_fit.EPILOG)(bench_fit.fit)
bench.command(epilog=bench_compare.EPILOG)(bench_compare.compare)
bench.command(epilog=bench_report.EPILOG)(bench_report.report)
