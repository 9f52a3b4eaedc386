"""docs/failures.md: every class is there once, every test it names exists, and every plant exists and is of that test."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

import pytest

from tests.mutations import MUTATIONS, ROOT
from tests.sim.bugs import BUGS

TABLE = ROOT / "docs" / "failures.md"
MODEL = ROOT / "tests" / "model" / "lease.pml"
NUM_CLASSES = 43


@dataclass(frozen=True)
class Row:
    name: str
    tests: tuple[str, ...]
    plants: tuple[str, ...]
    state: str


def rows_of(text: str) -> list[Row]:
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and re.fullmatch(r"F\d+", cells[0]):
            rows.append(Row(cells[0], _quoted(cells[2]), _quoted(cells[3]), cells[4]))
    return rows


def _quoted(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", cell))


ROWS = rows_of(TABLE.read_text(encoding="utf-8"))


def has_test(node: str) -> bool:
    """Without running or importing anything."""
    file, _, name = node.partition("::")
    path = ROOT / "tests" / file
    if not path.is_file() or not re.fullmatch(r"test_\w+", name):
        return False
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name == name for item in tree.body)


def problems_of(row: Row) -> list[str]:
    problems = [f"no test {node}" for node in row.tests if not has_test(node)]
    if not row.tests:
        problems.append("no test is named")
    for plant in row.plants:
        kind, _, name = plant.partition(": ")
        if kind == "sim" and (name not in BUGS or not any(node.startswith("sim/") for node in row.tests)):
            problems.append(f"no simulated machine {name}, or no test of the simulator in the row")
        elif kind == "mutation" and (name not in MUTATIONS or MUTATIONS[name].test.removeprefix("tests/") not in row.tests):
            problems.append(f"no mutation {name} of one of the row's tests")
        elif kind == "test" and not has_test(name):
            problems.append(f"no test {name}")
        elif kind == "macro" and not (_is_planted(name) and any(node.startswith("model/") for node in row.tests)):
            problems.append(f"no macro {name}, or no test of the model in the row")
        elif kind not in ("sim", "mutation", "test", "macro"):
            problems.append(f"unknown kind of plant: {plant}")
    if row.state.startswith("covered") and not row.plants:
        problems.append("covered, but nothing was planted")
    return problems


def _is_planted(macro: str) -> bool:
    return re.search(rf"\b{macro}\b", MODEL.read_text(encoding="utf-8")) is not None


def test_every_class_has_one_row() -> None:
    assert [row.name for row in ROWS] == [f"F{number}" for number in range(1, NUM_CLASSES + 1)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_a_row_names_exists(row: Row) -> None:
    assert problems_of(row) == []


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_fits_the_line_it_changes(name: str) -> None:
    mutation = MUTATIONS[name]
    assert (ROOT / mutation.path).read_text(encoding="utf-8").count(mutation.old) == 1
    assert mutation.old != mutation.new
    assert has_test(mutation.test.removeprefix("tests/"))
    assert any(f"mutation: {name}" in row.plants for row in ROWS)


def test_every_simulated_mistake_is_named_somewhere() -> None:
    named = {plant.removeprefix("sim: ") for row in ROWS for plant in row.plants if plant.startswith("sim: ")}
    assert named == set(BUGS)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("| F1 | x | `test_floors.py::test_gone` | `sim: push_on` | covered |", "no test test_floors.py::test_gone"),
        ("| F1 | x | `sim/test_seeds.py::test_no_invariant_breaks` | `sim: gone` | covered |", "no simulated machine gone"),
        ("| F1 | x | `sim/test_seeds.py::test_no_invariant_breaks` | `mutation: any-digest` | covered |", "no mutation any-digest"),
        ("| F1 | x | `sim/test_seeds.py::test_no_invariant_breaks` | | covered |", "nothing was planted"),
        ("| F1 | x | by hand | `by hand` | covered |", "no test is named"),
    ],
)
def test_a_wrong_row_is_noticed(line: str, problem: str) -> None:
    (row,) = rows_of(line)
    assert any(problem in found for found in problems_of(row))
