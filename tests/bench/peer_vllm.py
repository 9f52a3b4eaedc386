"""Steps of vLLM's engine in this process, as peers.py asks for them. Runs in vLLM's environment, not in pd-serve's.

    python peer_vllm.py MODEL_FOLDER

Time is that of LLMEngine.step(): what vLLM does for a step besides its operators belongs to it, as in a server.
"""

from __future__ import annotations

import os
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

_FIRST_ID, _NUM_IDS = 5, 32
_WARM_STEPS = 2


class Steps:
    def __init__(self, folder: str) -> None:
        llm = LLM(folder, dtype="bfloat16", max_model_len=4096, max_num_seqs=16, enable_prefix_caching=False, disable_log_stats=True)
        self._engine = llm.llm_engine
        self._count = 0

    def _add(self, length: int, num_outputs: int) -> None:
        self._count += 1
        params = SamplingParams(max_tokens=num_outputs, temperature=0.0, ignore_eos=True, detokenize=False)
        ids = [_FIRST_ID + (index * 7 + self._count) % _NUM_IDS for index in range(length)]
        self._engine.add_request(str(self._count), {"prompt_token_ids": ids}, params)

    def _step(self) -> tuple[float, float, int]:
        """Wall and processor seconds, and how many requests told of a token."""
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = self._engine.step()
        return time.perf_counter() - wall, time.process_time() - cpu, len(outputs)

    def prefill(self, length: int) -> list[tuple[float, float]]:
        self._add(length, 1)
        wall = cpu = 0.0
        while self._engine.has_unfinished_requests():
            step = self._step()
            wall, cpu = wall + step[0], cpu + step[1]
        return [(wall, cpu)]

    def decode(self, batch: int, context: int, count: int) -> list[tuple[float, float]]:
        """Contexts grow from `context` - count / 2, so that they are `context` on average."""
        for _ in range(batch):
            self._add(context - count // 2 - _WARM_STEPS, count + 3 * _WARM_STEPS)
        found = list[tuple[float, float]]()
        full = 0
        while self._engine.has_unfinished_requests():
            wall, cpu, num_outputs = self._step()
            full += num_outputs == batch
            if _WARM_STEPS < full <= count + _WARM_STEPS:
                found.append((wall, cpu))
        return found


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is no answer
    steps = Steps(sys.argv[1])
    print("ready", file=replies)
    for line in sys.stdin:
        what, *numbers = line.split()
        found = steps.prefill(int(numbers[0])) if what == "prefill" else steps.decode(*map(int, numbers))
        print(" ".join(f"{wall:.6f}/{cpu:.6f}" for wall, cpu in found), file=replies)


if __name__ == "__main__":
    main()
