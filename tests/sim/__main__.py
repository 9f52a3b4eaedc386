"""python -m tests.sim --seed K      replay one run with a readable log
python -m tests.sim --seeds N --start S     many runs, stopping at the first that breaks an invariant"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from tests.sim.world import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="the one run to replay")
    parser.add_argument("--seeds", type=int, default=1000, help="number of runs")
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--keep-going", action="store_true", help="list every failing seed instead of stopping at the first")
    options = parser.parse_args()
    if options.seed is not None:
        report = run_seed(options.seed, is_verbose=True)
        print(f"ok: {report}")
        return 0
    return _run_many(options.start, options.seeds, options.keep_going)


def _run_many(start: int, count: int, is_keeping_going: bool) -> int:
    totals: Counter[str] = Counter()
    failures = 0
    began = time.monotonic()
    for done, seed in enumerate(range(start, start + count), 1):
        try:
            report = run_seed(seed)
        except Exception as error:  # noqa: BLE001 - the root of a run: whatever a machine raised is a finding
            failures += 1
            if not is_keeping_going:
                traceback.print_exc()
                return 1
            notes = getattr(error, "__notes__", [""])
            print(f"\r{type(error).__name__}: {str(error)[:300]}  [{notes[-1]}]")
            continue
        totals.update(report.counts)
        totals["events"] += report.num_events
        if sys.stderr.isatty() or done == count:
            rate = done / (time.monotonic() - began)
            bar = "#" * (30 * done // count)
            print(f"\r[{bar:<30}] {done}/{count} runs, {rate:.0f}/s, {failures} failed", end="", file=sys.stderr)
    print(f"\n{count} runs, {failures} failed: {dict(sorted(totals.items()))}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
