"""data and evaluation import no losses and no detectors, and data imports torch only where it needs it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import bucketrank.data

SOURCE = Path(__file__).parents[2] / "src/bucketrank"
# lazy is below all packages: it imports names on use.
ALLOWED = {"data": {"data", "lazy"}, "evaluation": {"data", "evaluation", "lazy"}}


def packages(path: Path) -> set[str]:
    """Return the packages of bucketrank that a file imports, at the top or inside functions."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        elif isinstance(node, ast.Import):
            names += [each.name for each in node.names]
    return {name.split(".")[1] for name in names if name.startswith("bucketrank.")}


@pytest.mark.parametrize(
    "path",
    [path for package in ALLOWED for path in sorted((SOURCE / package).rglob("*.py"))],
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_data_and_evaluation_import_only_each_other(path: Path) -> None:
    assert packages(path) <= ALLOWED[path.relative_to(SOURCE).parts[0]]


def test_imports_of_a_file_are_found() -> None:
    assert packages(SOURCE / "evaluation/evaluator.py") == {"data", "evaluation"}


def test_checking_converting_and_drawing_need_no_torch() -> None:
    code = """
import sys
from bucketrank.data import check, find_splits, require_sound, write_shapes, Split
from bucketrank.data.convert import convert_cityscapes, convert_voc, convert_yolo
import bucketrank.data.summary
print("torch" in sys.modules)
"""
    command = [sys.executable, "-W", "error", "-c", code]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "False\n"


def test_every_exported_name_exists() -> None:
    assert all(callable(getattr(bucketrank.data, name)) for name in bucketrank.data.__all__)
    assert not hasattr(bucketrank.data, "no_such_name")
