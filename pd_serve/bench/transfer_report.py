"""What `bench transfer` measured as a result: figures by case, targets met or not, pictures. Called by its command."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pd_serve.bench.machine import MachineWatch
from pd_serve.bench.plots_transfer import transfer_pictures
from pd_serve.bench.progress import Bars
from pd_serve.bench.report import write_picture
from pd_serve.bench.results import ArmResult, Described, Result, new_result, now_iso, write_result
from pd_serve.bench.transfer import TransferOptions, measure, num_cases, targets_of


def run_transfer(options: TransferOptions, name: str, path: Path, bars: Bars) -> Result:
    """Measure, draw, and write the result to `path`. Raises BenchError."""
    started_at = now_iso()
    bar = bars.add("cases", num_cases(options))
    with MachineWatch() as watch:
        outcomes, notes = measure(options, bar.advance)
    notes += [target.words() for target in targets_of(outcomes)]
    pictures = tuple(write_picture(path, name, png) for name, png in transfer_pictures(outcomes).items())
    described = Described(
        kind="transfer",
        name=name,
        parameters={
            "transport": options.transport,
            "lanes": ",".join(options.lanes),
            "layouts": ",".join(options.layouts),
            "num_tokens": options.num_tokens,
            "rounds": options.rounds,
            "pass_bytes": options.pass_nbytes,
            "pool_bytes": options.pool_nbytes,
        },
        notes=tuple(notes),
    )
    arms = {outcome.name: ArmResult(outcome.figures()) for outcome in outcomes}
    result = msgspec.structs.replace(new_result(described, watch.load, arms, started_at), pictures=pictures)
    write_result(path, result)
    return result
