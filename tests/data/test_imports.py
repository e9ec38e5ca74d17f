"""Imports go one way: data and evaluation know no loss and no detector."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import bucketrank.data

SOURCE = Path(__file__).parents[2] / "src/bucketrank"
KNOWN = {"data": {"data"}, "evaluation": {"data", "evaluation"}}


def rooms(path: Path) -> set[str]:
    """The rooms of the house that a file imports from, wherever in it."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        elif isinstance(node, ast.Import):
            names += [each.name for each in node.names]
    return {name.split(".")[1] for name in names if name.startswith("bucketrank.")}


@pytest.mark.parametrize(
    "path",
    [path for room in KNOWN for path in sorted((SOURCE / room).rglob("*.py"))],
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_data_and_evaluation_know_nobody(path: Path) -> None:
    assert rooms(path) <= KNOWN[path.relative_to(SOURCE).parts[0]]


def test_that_test_bites() -> None:
    assert rooms(SOURCE / "evaluation/evaluator.py") == {"data", "evaluation"}


def test_checking_converting_and_drawing_need_no_torch() -> None:
    code = """
import sys
from bucketrank.data import check, find_splits, require_sound, write_shapes, Split
import bucketrank.data.convert, bucketrank.data.summary
print("torch" in sys.modules)
"""
    command = [sys.executable, "-W", "error", "-c", code]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "False\n"


def test_every_name_is_there() -> None:
    assert all(callable(getattr(bucketrank.data, name)) for name in bucketrank.data.__all__)
    assert not hasattr(bucketrank.data, "no_such_name")
