"""The wheel and the sdist: built, checked, and used in an environment that has torch alone."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hatch_build import with_absolute_links
from tests.release_check import ROOT, project_table

PYCON = re.compile(r"^```pycon\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IMPORT = re.compile(r"^>>> (?:import|from) (\w+)", re.MULTILINE)

# Runs the examples of the first argument and prints the packages beyond the standard library that this loaded.
RUN_EXAMPLES = """
import doctest, json, pathlib, sys
text = pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")
test = doctest.DocTestParser().get_doctest(text, {}, "README", "README", 0)
runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
failed, tried = runner.run(test)
import bucketrank
print(json.dumps({"failed": failed, "tried": tried, "version": bucketrank.__version__, "file": bucketrank.__file__}))
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist and, from it, the wheel, with the installed hatchling."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder


def torch_and_its_requirements() -> list[importlib.metadata.Distribution]:
    """Return the installed distributions that an installation of torch brings."""
    asked, distributions = [Requirement("torch")], {}
    while asked:
        requirement = asked.pop()
        distribution = importlib.metadata.distribution(requirement.name)
        distributions[canonicalize_name(requirement.name)] = distribution
        for text in distribution.requires or []:
            each = Requirement(text)
            if each.marker is None or any(
                each.marker.evaluate({"extra": extra}) for extra in ["", *requirement.extras]
            ):
                asked.append(each)
    return list(distributions.values())


@pytest.fixture(scope="module")
def environment(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a new environment: the wheel, and links to the installed torch and what it requires."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    program = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.strip())
    for distribution in torch_and_its_requirements():
        record = distribution.read_text("RECORD") or ""
        tops = {re.split("[/,]", line, maxsplit=1)[0] for line in record.splitlines()} - {"..", "__pycache__"}
        for top in tops:
            source, link = Path(str(distribution.locate_file(top))), packages / top
            if not link.exists():
                link.symlink_to(source, target_is_directory=source.is_dir())
    (wheel,) = dist.glob("*.whl")
    # Without an index pip fails if torch is missing. Without PYTHONPATH it sees the packages of the environment alone.
    install = [sys.executable, "-m", "pip", "--isolated", "--python", str(python), "install", "--no-index", str(wheel)]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(install, check=True, capture_output=True, text=True, env=variables)
    return python


@pytest.mark.release
def test_pypi_accepts_the_description(dist):
    files = sorted(str(path) for path in dist.iterdir())
    assert [Path(path).name for path in files] == [
        f"bucketrank-{project_table()['version']}-py3-none-any.whl",
        f"bucketrank-{project_table()['version']}.tar.gz",
    ]
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True, capture_output=True)


@pytest.mark.release
def test_metadata_has_the_addresses_and_no_relative_link(dist):
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = HeaderParser().parsestr(archive.read(name).decode())
        assert any(each.endswith("bucketrank/py.typed") for each in archive.namelist())
    addresses = dict(line.split(", ") for line in metadata.get_all("Project-URL", []))
    assert addresses == project_table()["urls"]
    description = str(metadata.get_payload())
    targets = re.findall(r"\]\(([^)]+)\)", re.sub(r"^```.*?^```$", "", description, flags=re.MULTILINE | re.DOTALL))
    assert targets
    assert [target for target in targets if not target.startswith(("https://", "http://", "#"))] == []


@pytest.mark.release
def test_the_sdist_has_what_the_tests_read(dist):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "Makefile",
        "conftest.py",
        "hatch_build.py",
        "mkdocs.yml",
        "requirements-demo.txt",
        "requirements-dev.txt",
        "tests/conftest.py",
    } <= names
    assert {".ci/oldest.txt", ".github/workflows/tests.yml", "CITATION.cff", "LICENSE", "README.md"} <= names


@pytest.mark.release
def test_the_quick_start_of_readme_runs_with_torch_alone(environment, tmp_path):
    blocks = PYCON.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    examples = [block for block in blocks if set(IMPORT.findall(block)) <= {"torch", "bucketrank"}]
    assert examples, "README needs an example (pycon) that imports nothing but torch and bucketrank"
    script = tmp_path / "examples.txt"
    script.write_text("\n".join(examples), encoding="utf-8")
    # -I: neither this checkout nor PYTHONPATH is on the path.
    command = [environment, "-I", "-c", RUN_EXAMPLES, str(script)]
    report = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    result = json.loads(report.stdout.splitlines()[-1])
    assert result["failed"] == 0, report.stdout
    assert result["tried"] > 0
    assert result["version"] == project_table()["version"]
    assert not Path(result["file"]).is_relative_to(ROOT)


@pytest.mark.release
def test_that_environment_has_no_other_package(environment):
    program = "import importlib.util as u; print([name for name in ('numba', 'PIL', 'pytest') if u.find_spec(name)])"
    assert (
        subprocess.run([environment, "-I", "-c", program], check=True, capture_output=True, text=True).stdout == "[]\n"
    )


def test_relative_links_become_absolute():
    text = """[a](docs/a.md#part) ![b](docs/b.svg) [c](https://c) [d](#d) [![e](../../e.svg)](../../e)
<img src="docs/f.png">
```python
rows[0](docs)
```
"""
    expected = """[a](R/blob/v1/docs/a.md#part) ![b](R/raw/v1/docs/b.svg) [c](https://c) [d](#d) [![e](R/e.svg)](R/e)
<img src="R/raw/v1/docs/f.png">
```python
rows[0](docs)
```
"""
    assert with_absolute_links(text, repository="R", tag="v1") == expected
