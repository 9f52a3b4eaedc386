"""Steps of pd-serve's engine in this process, as peers.py asks for them.

python -m tests.bench.peer_ours [CHUNK] [THREADS]

As `pd-serve bench engine --cpu-ops auto` computes them; prompts in chunks of CHUNK tokens (engine.max_batch_tokens).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable

from pd_serve.bench.engine_steps import decode_batch, prefill_batches
from pd_serve.clock import MonotonicClock
from pd_serve.config import Config
from pd_serve.cores import thread_env
from pd_serve.engine.batch import Batch
from pd_serve.model_store import resolve_model

_WARM_STEPS = 2


def main() -> None:
    chunk = int(sys.argv[1]) if len(sys.argv) > 1 else Config().engine.max_batch_tokens
    threads = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    os.environ.update(thread_env(threads))  # before torch is imported
    from pd_serve.engine.loader import load_runner, plan_engine
    from pd_serve.engine.memory_speed import use_threads

    use_threads(threads)
    config = Config()
    engine = config.engine.model_copy(update={"threads": threads, "max_batch_tokens": chunk})
    folder = resolve_model(config.model.id, config.model.cache_dir)
    runner = load_runner(plan_engine(folder, config.model_copy(update={"engine": engine})), None, MonotonicClock())
    block_size = runner.cache.layout.block_size

    def timed(batches: Iterable[Batch]) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        for batch in batches:
            runner.execute(batch)
        return time.perf_counter() - wall, time.process_time() - cpu

    print("ready", flush=True)
    for line in sys.stdin:
        what, *words = line.split()
        if what == "prefill":
            found = [timed(prefill_batches(int(words[0]), chunk, block_size))]
        else:
            batch, context, count = map(int, words)
            step = decode_batch(batch, context, block_size)
            found = [timed([step]) for _ in range(count + _WARM_STEPS)][_WARM_STEPS:]
        print(" ".join(f"{wall:.6f}/{cpu:.6f}" for wall, cpu in found), flush=True)


if __name__ == "__main__":
    main()
