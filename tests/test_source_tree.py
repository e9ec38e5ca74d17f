"""The source tree: module names that occur once, short files, and documents that name files which exist."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/bucketrank"
MODULES = [path for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").rglob("*.md"))
NAMED_FILE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|yaml|toml|csv|css|js))(?::(\d+))?`")
LINE_COUNT = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.py)` \((\d+) lines\)")
# Files of a user or of a run, or that must not exist, not of this repository.
FOREIGN = {"utils.py", "recipe.yaml", "data.yaml", "train.csv", "validation.csv", "mine.yaml"}


def test_every_module_name_occurs_once():
    counts = Counter(path.name for path in MODULES)
    assert [name for name, count in counts.items() if count > 1] == []


def test_no_file_is_longer_than_400_lines():
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert {path: length for path, length in lengths.items() if length > 400} == {}


FOLDERS = (".ci", "docs", "examples", "src", "tests")
FILES = [f"/{path.relative_to(ROOT).as_posix()}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
FILES += [f"/{path.name}" for path in ROOT.iterdir()]


def missing_files(text: str) -> list[str]:
    """Return the files that a document names in backticks and that do not exist."""
    names = {match[1] for match in NAMED_FILE.finditer(text)} - FOREIGN
    return [name for name in sorted(names) if not any(path.endswith(f"/{name}") for path in FILES)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_name_files_that_exist(document):
    text = document.read_text(encoding="utf-8")
    assert missing_files(text) == []
    for name, count in LINE_COUNT.findall(text):
        (path,) = [each for each in SOURCE.rglob("*.py") if each.as_posix().endswith(f"/{name}")]
        length = len(path.read_text().splitlines())
        assert abs(length - int(count)) <= 0.2 * length, f"{name} has {length} lines"


def test_that_test_bites():
    assert missing_files("see `detectors/no_such_file.py` and `losses/terms.py`") == ["detectors/no_such_file.py"]
