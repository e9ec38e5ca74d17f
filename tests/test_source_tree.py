"""The source tree: file lengths, documents that name only files that exist, and the sample of tests."""

import re
from pathlib import Path

import pytest
import yaml

from tests.conftest import pytest_collection_modifyitems

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/bucketrank"
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").rglob("*.md"))
NAMED_FILE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|yaml|toml|csv|css|js))(?::(\d+))?`")
# Files of a user or of a run, or that must not exist, not of this repository.
FOREIGN = {"utils.py", "recipe.yaml", "data.yaml", "train.csv", "validation.csv", "mine.yaml"}


def test_a_file_is_one_subject_of_at_most_600_lines():
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert {path: length for path, length in lengths.items() if length > 600} == {}


def test_no_file_is_too_small_to_be_a_subject():
    modules = [path for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]
    assert [path.name for path in modules if len(path.read_text().splitlines()) < 25] == []


FOLDERS = (".ci", "benchmarks", "docs", "examples", "src", "tests")
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


def test_that_test_bites():
    assert missing_files("see `detectors/no_such_file.py` and `losses/terms.py`") == ["detectors/no_such_file.py"]


def test_the_audit_covers_the_pins_that_are_installed_and_fails_where_it_cannot_look_one_up():
    workflow = yaml.safe_load((ROOT / ".github/workflows/audit.yml").read_text(encoding="utf-8"))
    assert "schedule" in workflow[True], "YAML reads the key on as true"
    commands = [
        step["run"] for step in workflow["jobs"]["pip-audit"]["steps"] if "--requirement" in step.get("run", "")
    ]
    assert len(commands) == 2
    assert all("--strict" in command and "--requirement requirements-dev.txt" in command for command in commands)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "LOCK := requirements-dev.txt" in makefile
    assert "--require-hashes --only-binary :all: -r $(LOCK)" in makefile
    assert "--require-hashes --only-binary :all: -r requirements-demo.txt" in makefile


def test_the_demo_installs_a_part_of_the_audited_packages():
    demo, dev = (
        set(re.findall(r"^([a-z0-9.-]+==\S+)", (ROOT / f"requirements-{name}.txt").read_text(), flags=re.MULTILINE))
        for name in ("demo", "dev")
    )
    assert demo < dev, "call make lock"
    assert not {pin.split("==")[0] for pin in demo} & {"lightning", "mkdocs", "mypy", "pytest", "transformers"}


def test_the_security_policy_names_files_that_exist():
    named = re.findall(r"`([\w./-]+\.txt)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_workflows_install_packages_by_hash_only():
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows").glob("*.yml")]
    installs = [line for text in texts for line in text.splitlines() if "pip install" in line]
    assert installs
    assert [line for line in installs if "--require-hashes" not in line] == []


@pytest.mark.parametrize("name", ["requirements-dev.txt", "requirements-demo.txt", ".ci/audit/requirements.txt"])
def test_every_pin_has_a_hash_and_no_pin_an_address(name):
    lock = (ROOT / name).read_text(encoding="utf-8")
    assert "://" not in lock
    pins = re.split(r"^(?=[a-z])", lock, flags=re.MULTILINE)[1:]
    assert all(re.match(r"[a-z0-9.-]+==\S+ .*\\\n    --hash=sha256:[0-9a-f]{64}", pin) for pin in pins)


def test_every_direct_dependency_is_pinned():
    lock = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8")
    pinned = set(re.findall(r"^([a-z0-9.-]+)==", lock, flags=re.MULTILINE))
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 brings tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    direct = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    names = {re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-") for requirement in direct}
    assert names - pinned == {"bucketrank"}, "call make lock"


class Case:
    """An item of pytest: one case of a test."""

    def __init__(self, nodeid: str, sampled: int | None) -> None:
        self.nodeid, self.sampled = nodeid, sampled
        self.added: list[str] = []

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return pytest.mark.sampled(self.sampled).mark if name == "sampled" and self.sampled else None

    def add_marker(self, name: str) -> None:
        self.added.append(name)


def test_every_nth_case_of_a_sampled_test_is_fast():
    cases = [Case(f"a.py::test[{number}]", 3) for number in range(7)]
    cases += [Case("a.py::other[0]", 3), Case("a.py::plain", None)]
    pytest_collection_modifyitems(cases)  # type: ignore[arg-type]
    slow = [case.added == ["slow"] for case in cases]
    assert slow == [False, True, True, False, True, True, False, False, False]
