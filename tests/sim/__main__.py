"""python -m tests.sim --seed K                replay one run with a readable log
python -m tests.sim --seeds N --start S     many runs, stopping at the first that breaks an invariant"""

from __future__ import annotations

import argparse
import sys
import time

from pd_serve.cores import usable_cores
from tests.sim.many import Runs, run_all
from tests.sim.world import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="the one run to replay")
    parser.add_argument("--seeds", type=int, default=100_000, help="number of runs")
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="processes that run them")
    parser.add_argument("--keep-going", action="store_true", help="list every failing seed instead of stopping at the first")
    options = parser.parse_args()
    if options.seed is not None:
        report = run_seed(options.seed, is_verbose=True)
        print(f"ok: {report}")
        return 0
    return _run_many(range(options.start, options.start + options.seeds), options.jobs, options.keep_going)


def _run_many(seeds: range, num_jobs: int, is_keeping_going: bool) -> int:
    sums = Runs()
    began = time.monotonic()
    for runs in run_all(seeds, num_jobs):
        sums.add(runs)
        if sys.stderr.isatty() or sums.num_runs == len(seeds):
            bar = "#" * (30 * sums.num_runs // len(seeds))
            rate = sums.num_runs / (time.monotonic() - began)
            print(f"\r[{bar:<30}] {sums.num_runs}/{len(seeds)} runs, {rate:.0f}/s, {len(sums.failures)} failed", end="", file=sys.stderr)
        for failure in runs.failures:
            print(f"\n{failure}", flush=True)
        if runs.failures and not is_keeping_going:
            return 1
    print(f"\n{sums.num_runs} runs, {len(sums.failures)} failed: {dict(sorted(sums.totals.items()))}")
    return 1 if sums.failures else 0


if __name__ == "__main__":
    sys.exit(main())
