from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from pd_serve.clock import MonotonicClock
from pd_serve.engine.batch import Batch, StepResult
from pd_serve.grammar.base import Grammar, GrammarKind
from tests.patience import PATIENCE_S
from workers.engine_thread import MAX_FAILED_STEPS, EngineFailed, EngineThread, LayerHook
from workers.events import StepDone, StepFailed
from workers.transport_commands import LayerReady, StepSampled


class Runner:
    """Two layers; fails the steps it is told to."""

    def __init__(self, failing: frozenset[int] = frozenset()) -> None:
        self._failing = failing
        self.threads: set[str] = set()

    def execute(self, batch: Batch, on_layer: Callable[[int], None] | None) -> StepResult:
        self.threads.add(threading.current_thread().name)
        if batch.step_id in self._failing:
            raise ValueError("planted")
        for layer in range(2):
            if on_layer is not None:
                on_layer(layer)
        return StepResult(batch.step_id, (), 0.0, 1.0)


@pytest.fixture
def engine() -> Iterator[tuple[EngineThread, SimpleQueue[object]]]:
    said: SimpleQueue[object] = SimpleQueue()
    thread = EngineThread(said.put, MonotonicClock())
    thread.start()
    yield thread, said
    assert thread.stop(PATIENCE_S)


def test_layers_are_reported_before_the_end_of_their_step(engine: tuple[EngineThread, SimpleQueue[object]]) -> None:
    thread, said = engine
    runner = Runner()
    thread.serve(runner, LayerHook(said.put))
    thread.run(Batch(4, ()), frozenset({0, 1}))
    layers = [said.get(timeout=PATIENCE_S), said.get(timeout=PATIENCE_S)]
    assert [(item.step_id, item.layer, item.ready) for item in layers if isinstance(item, LayerReady)] == [(4, 0, None), (4, 1, None)]
    assert isinstance(said.get(timeout=PATIENCE_S), StepDone)
    assert runner.threads == {"engine"}


def test_a_grammar_that_is_to_come_is_prepared_where_that_is_possible(engine: tuple[EngineThread, SimpleQueue[object]]) -> None:
    thread, said = engine
    grammar = Grammar(GrammarKind.REGEX, "a")
    prepared: list[Grammar] = []
    thread.expect(grammar)
    thread.serve(Runner(), LayerHook(said.put), prepared.append)
    thread.expect(grammar)
    assert prepared == [grammar]


def test_layers_held_back_are_told_with_the_next_that_is_pushed(engine: tuple[EngineThread, SimpleQueue[object]]) -> None:
    thread, said = engine
    thread.serve(Runner(), LayerHook(said.put))
    for step_id in (1, 2):
        thread.run(Batch(step_id, ()), frozenset({1}))
        layer = said.get(timeout=PATIENCE_S)
        assert isinstance(layer, LayerReady)
        assert (layer.step_id, layer.layer, len(layer.held)) == (step_id, 1, 1)
        assert layer.held[0] <= layer.written_at
        assert isinstance(said.get(timeout=PATIENCE_S), StepDone)


def test_what_was_sampled_is_told_before_the_end_of_a_step_with_completions(engine: tuple[EngineThread, SimpleQueue[object]]) -> None:
    thread, said = engine
    thread.serve(Runner(failing=frozenset({2})), LayerHook(said.put))
    thread.run(Batch(1, ()), has_completions=True)
    assert said.get(timeout=PATIENCE_S) == StepSampled(StepResult(1, (), 0.0, 1.0))
    assert isinstance(said.get(timeout=PATIENCE_S), StepDone)
    thread.run(Batch(2, ()), has_completions=True)
    assert isinstance(said.get(timeout=PATIENCE_S), StepFailed)


def test_step_without_pushes_reports_no_layer(engine: tuple[EngineThread, SimpleQueue[object]]) -> None:
    thread, said = engine
    thread.serve(Runner(), LayerHook(said.put))
    thread.run(Batch(1, ()))
    assert isinstance(said.get(timeout=PATIENCE_S), StepDone)


def test_device_that_writes_later_is_waited_for_layer_by_layer(engine: tuple[EngineThread, SimpleQueue[object]]) -> None:
    thread, said = engine
    waited: list[int] = []
    thread.serve(Runner(), LayerHook(said.put, waited.append))
    thread.run(Batch(1, ()), frozenset({0, 1}))
    for _ in range(2):
        layer = said.get(timeout=PATIENCE_S)
        assert isinstance(layer, LayerReady)
        assert layer.ready is not None
        layer.ready()
    assert waited == [0, 1]
    said.get(timeout=PATIENCE_S)


def test_failed_steps_in_a_row_end_the_engine_but_single_ones_do_not(engine: tuple[EngineThread, SimpleQueue[object]]) -> None:
    thread, said = engine
    failing = frozenset({1, 2, 4, 5, 6})
    thread.serve(Runner(failing), LayerHook(said.put))
    for step_id in range(1, 4 + MAX_FAILED_STEPS):
        thread.run(Batch(step_id, ()))
    kinds = [type(said.get(timeout=PATIENCE_S)) for _ in range(7)]
    assert kinds == [StepFailed, StepFailed, StepDone, StepFailed, StepFailed, StepFailed, EngineFailed]


def test_call_runs_on_the_engine_thread_and_hands_back_what_it_raises(engine: tuple[EngineThread, SimpleQueue[object]]) -> None:
    thread, _ = engine
    assert thread.call(lambda: threading.current_thread().name).result(PATIENCE_S) == "engine"

    def fail() -> None:
        raise KeyError("planted")

    with pytest.raises(KeyError):
        thread.call(fail).result(PATIENCE_S)
    assert thread.call(lambda: 3).result(PATIENCE_S) == 3
