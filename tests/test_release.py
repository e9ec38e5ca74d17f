"""Conditions of a release: one version, one place for the addresses, and workflows that call make."""

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from tests.release_check import PLACEHOLDER, ROOT, project_table, release_problems

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z]+):.*## ", MAKEFILE, re.MULTILINE))
MAKE_CALL = re.compile(r"\bmake ([^\n;&|]+)")
TEXT_SUFFIXES = {"", ".cff", ".css", ".html", ".ipynb", ".md", ".py", ".toml", ".txt", ".yaml", ".yml"}


def read_workflow(path: Path) -> dict[Any, Any]:
    workflow: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return workflow


def make_targets(command: str) -> list[str]:
    """Return the targets of the calls of make in a shell command, without the variables that the calls set."""
    words = [word for call in MAKE_CALL.findall(command) for word in call.split()]
    return [word for word in words if "=" not in word]


def test_workflows_call_targets_of_the_makefile():
    commands = [step.get("run", "") for path in WORKFLOWS for step in steps_of(read_workflow(path))]
    targets = {target for command in commands for target in make_targets(command)}
    assert targets == {"artifacts", "docs", "lint", "losses", "package", "pages", "sbom", "tagcheck", "test"}
    assert targets <= TARGETS


def test_that_test_bites():
    assert make_targets("make setup LOCK= && make nosuch PYTHON=python") == ["setup", "nosuch"]
    assert "nosuch" not in TARGETS


def steps_of(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_has_few_rights_and_ends(path):
    workflow = read_workflow(path)
    assert workflow["permissions"] == {}, "each job names the rights it needs"
    assert "concurrency" in workflow
    for job in workflow["jobs"].values():
        assert "timeout-minutes" in job or "uses" in job
        assert "write" not in job["permissions"].values() or path.stem in {"docs", "release"}
    for step in steps_of(workflow):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), "pin an action by its commit"
            if step["uses"].startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_tests_run_on_every_python_that_the_classifiers_name():
    classifiers = project_table()["classifiers"]
    named = [classifier.rpartition(" ")[2] for classifier in classifiers if re.search(r":: 3\.\d+$", classifier)]
    jobs = read_workflow(ROOT / ".github/workflows/tests.yml")["jobs"]
    assert jobs["linux"]["strategy"]["matrix"]["python"] == named
    assert jobs["losses"]["strategy"]["matrix"]["system"] == ["macos-latest", "windows-latest"]


def test_the_oldest_packages_are_the_lower_bounds():
    project = project_table()
    bounds = [Requirement(text) for text in [*project["dependencies"], *project["optional-dependencies"]["fast"]]]
    lines = (ROOT / ".ci/oldest.txt").read_text(encoding="utf-8").splitlines()
    pinned = [Requirement(line) for line in lines if not line.startswith("#")]
    assert {pin.name for pin in pinned} == {bound.name for bound in bounds}
    lowest = {bound.name: min(Version(each.version) for each in bound.specifier) for bound in bounds}
    for pin in pinned:
        (version,) = pin.specifier
        assert Version(version.version) == lowest[pin.name], f"{pin.name} in .ci/oldest.txt"


def test_the_hooks_of_git_use_installed_tools():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    entries = [hook["entry"].split() for source in config["repos"] for hook in source["hooks"]]
    tools = [entry[0].removeprefix(".venv/bin/") for entry in entries if entry[0] != "make"]
    scripts = Path(sysconfig.get_path("scripts"))
    assert [tool for tool in tools if not shutil.which(tool, path=str(scripts))] == []
    assert [entry[1] for entry in entries if entry[0] == "make"] == ["workflows"]
    assert "workflows" in TARGETS


@pytest.mark.parametrize("name", ["bug", "proposal", "results"])
def test_issue_forms_ask_for_something(name):
    form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text(encoding="utf-8"))
    assert form["name"]
    assert form["description"]
    fields = [each for each in form["body"] if each["type"] != "markdown"]
    assert len({each["id"] for each in fields}) == len(fields) > 0


def test_the_documentation_has_the_addresses_of_the_package(monkeypatch):
    defaults = pytest.importorskip("mkdocs.config.defaults", reason="needs the extra docs")
    from docs.hooks.addresses import on_config, on_post_page

    config = defaults.MkDocsConfig()
    config.extra = {}
    monkeypatch.delenv("MIKE_DOCS_VERSION", raising=False)
    on_config(config)
    urls = project_table()["urls"]
    assert (config.site_url, config.repo_url) == (urls["Documentation"], urls["Repository"])
    assert "version" not in config.extra
    monkeypatch.setenv("MIKE_DOCS_VERSION", "0.1.0")
    assert on_config(config).extra["version"]["provider"] == "mike"
    assert on_post_page('<a class="md-source" data-md-component="source">') == '<a class="md-source">'
    assert not {"site_url", "repo_url"} & set(re.findall(r"^(\w+):", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))


def files_of_the_repository() -> list[Path]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return [ROOT / name for name in names.splitlines() if Path(name).suffix in TEXT_SUFFIXES and (ROOT / name).exists()]


def test_the_addresses_stand_in_one_table():
    files = files_of_the_repository()
    if not files:
        pytest.skip("not a git checkout")
    urls = project_table()["urls"]
    assert list(urls) == ["Homepage", "Documentation", "Repository", "Issues", "Changelog"]
    owner, name = urls["Repository"].removeprefix("https://github.com/").split("/")
    assert urls["Homepage"] == urls["Repository"]
    assert urls["Documentation"] == f"https://{owner}.github.io/{name}/"
    assert urls["Issues"] == f"{urls['Repository']}/issues"
    assert urls["Changelog"] == f"{urls['Repository']}/blob/main/CHANGELOG.md"
    # An address with the owner's name outside of the table would be forgotten when the owner changes.
    address = re.compile(rf"github\.com/{owner}/|{owner}\.github\.io|\b{PLACEHOLDER}/{name}")
    elsewhere = [path for path in files if address.search(path.read_text(encoding="utf-8"))]
    assert elsewhere == [ROOT / "pyproject.toml"]


def test_citation_has_the_version_and_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == project_table()["version"]
    assert citation["license"] == project_table()["license"]
    paper = citation["preferred-citation"]
    assert paper["doi"] == f"10.48550/arXiv.{paper['url'].removeprefix('https://arxiv.org/abs/')}"
    assert all(re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{5}", each["url"]) for each in citation["references"])


def copy_of_the_metadata(folder: Path, *, version: str, owner: str) -> Path:
    """Write the files that a release is checked by, ready for a release."""
    for name in ("pyproject.toml", "CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, folder)
    current = project_table()["version"]
    for name, old, new in (
        ("pyproject.toml", PLACEHOLDER, owner),
        ("pyproject.toml", f'version = "{current}"', f'version = "{version}"'),
        ("CITATION.cff", f"version: {current}", f"version: {version}"),
    ):
        path = folder / name
        path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    with (folder / "CHANGELOG.md").open("a", encoding="utf-8") as changelog:
        changelog.write(f"\n## [{version}] - 2026-12-01\n")
    return folder


def test_a_release_that_is_ready_has_no_problem(tmp_path):
    root = copy_of_the_metadata(tmp_path, version="9.8.7", owner="somebody")
    assert release_problems("v9.8.7", repository="Somebody/bucketrank", root=root) == []


def test_every_problem_of_a_release_is_named(tmp_path):
    root = copy_of_the_metadata(tmp_path, version="9.8.7.dev0", owner=PLACEHOLDER)
    (root / "CHANGELOG.md").write_text("## [Unreleased]: 9.8.7\n", encoding="utf-8")
    citation = root / "CITATION.cff"
    citation.write_text(citation.read_text(encoding="utf-8").replace("9.8.7.dev0", "9.8.6"), encoding="utf-8")
    problems = release_problems("v9.8.7", repository="somebody/bucketrank", root=root)
    expected = ["tag:", "version in pyproject.toml:", "project.urls", "CHANGELOG.md:", "version in CITATION.cff:"]
    assert [problem.startswith(start) for problem, start in zip(problems, expected, strict=True)] == [True] * 5
    root = copy_of_the_metadata(tmp_path, version="9.8.7", owner="somebody")
    (problem,) = release_problems("v9.8.7", repository="else/where", root=root)
    assert problem.startswith("Repository in pyproject.toml: expected https://github.com/else/where, got")
