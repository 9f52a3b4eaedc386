"""A lane that sends a layer's KV only when it is allowed to: as slow as a test wants it, without a clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from pd_serve.engine.runner import ModelRunner

DEADLINE_S = 60.0


class SlowLane:
    """`with SlowLane(runner, blocks) as lane:`, with `lane.submit` as the step's on_layer. Its thread stands for the transport's: it waits
    until the device has written the layer, then copies the blocks, on CUDA on a stream of its own."""

    def __init__(self, runner: ModelRunner[Any], blocks: tuple[int, ...]) -> None:
        self.sent: dict[int, Tensor] = {}
        """By layer, in the order of sending: what was read of it."""
        self._runner = runner
        self._blocks = torch.tensor(blocks, device=runner.cache.region.device)
        self._queue: SimpleQueue[int | None] = SimpleQueue()
        self._permits = threading.Semaphore(0)
        self._progress = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        is_cuda = runner.cache.region.device.type == "cuda"
        self._stream = torch.cuda.Stream() if is_cuda else None  # type: ignore[no-untyped-call]

    def __enter__(self) -> SlowLane:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.put(None)
        self.allow(1000)
        self._thread.join(DEADLINE_S)

    def submit(self, layer: int) -> None:
        self._queue.put(layer)

    def allow(self, count: int) -> None:
        """Let it send so many layers more."""
        self._permits.release(count)

    def wait_for(self, is_met: Callable[[], bool]) -> bool:
        """Until what was sent meets the condition; False when it does not within the deadline."""
        with self._progress:
            return self._progress.wait_for(is_met, DEADLINE_S)

    def _run(self) -> None:
        events = self._runner.layer_events
        while (layer := self._queue.get()) is not None:
            self._permits.acquire()
            if events is not None:
                events.wait(layer)
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                read = self._runner.cache.layer(layer).slab[self._blocks].clone()
            if self._stream is not None:
                self._stream.synchronize()
            with self._progress:
                self.sent[layer] = read
                self._progress.notify_all()


def check_that_a_slow_lane_holds_nothing_up(runner: ModelRunner[Any], blocks: tuple[int, ...], execute: Callable[[Any], object]) -> None:
    """`execute(on_layer)` computes one step that is pushed. The step ends though nothing can be sent; what is sent later is right."""
    num_layers = runner.cache.layout.num_layers
    with SlowLane(runner, blocks) as lane:
        execute(lane.submit)
        assert lane.sent == {}, "it was not allowed to send yet, and the step has ended"
        lane.allow(num_layers)
        assert lane.wait_for(lambda: len(lane.sent) == num_layers)
    _check_sent(runner, blocks, lane)


def check_that_layers_are_sent_while_later_ones_are_computed(
    runner: ModelRunner[Any], blocks: tuple[int, ...], execute: Callable[[Any], object]
) -> None:
    """When a layer is written, all before it have been sent, from this very step: so they were there before it ended."""
    num_layers = runner.cache.layout.num_layers
    with SlowLane(runner, blocks) as lane:
        lane.allow(num_layers)

        def on_layer(layer: int) -> None:
            assert lane.wait_for(lambda: len(lane.sent) == layer), f"layers before {layer} wait for the step's end"
            lane.submit(layer)

        execute(on_layer)
        assert lane.wait_for(lambda: len(lane.sent) == num_layers)
    _check_sent(runner, blocks, lane)


def _check_sent(runner: ModelRunner[Any], blocks: tuple[int, ...], lane: SlowLane) -> None:
    assert list(lane.sent) == list(range(runner.cache.layout.num_layers))
    for layer, sent in lane.sent.items():
        assert torch.equal(sent, runner.cache.layer(layer).slab[list(blocks)]), f"layer {layer} was sent before it was written"
        assert sent.ne(0).any()
