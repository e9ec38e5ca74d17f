"""Check that a tag can be released: ``python -m tests.release_check v0.1.0``.

The release workflow runs this before it builds anything.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PLACEHOLDER = "OWNER"


def project_table(root: Path = ROOT) -> dict[str, Any]:
    """Return the table ``project`` of pyproject.toml."""
    project: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def release_problems(tag: str, *, repository: str = "", root: Path = ROOT) -> list[str]:
    """Return the reasons not to release a tag. ``repository`` is GitHub's ``owner/name``; empty outside of GitHub."""
    project = project_table(root)
    version, addresses = project["version"], project["urls"]
    problems = []
    if tag != f"v{version}":
        problems.append(f"tag: expected v{version} like the version in pyproject.toml, got {tag or 'none'}")
    if not re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", version):
        problems.append(f"version in pyproject.toml: expected three numbers like 0.1.0, got {version}")
    if any(PLACEHOLDER in address for address in addresses.values()):
        problems.append(f"project.urls in pyproject.toml: expected your account on GitHub, got {PLACEHOLDER}")
    elif repository and addresses["Repository"].lower() != f"https://github.com/{repository}".lower():
        problems.append(
            f"Repository in pyproject.toml: expected https://github.com/{repository}, got {addresses['Repository']}"
        )
    if not re.search(
        rf"^## \[{re.escape(version)}\]", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    ):
        problems.append(f"CHANGELOG.md: expected a section '## [{version}]'; rename the section of unreleased changes")
    citation = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    if citation["version"] != version:
        problems.append(f"version in CITATION.cff: expected {version}, got {citation['version']}")
    return problems


def main() -> int:
    """Print the reasons not to release the tag of the command line, and return 1 if there are any."""
    tag = sys.argv[1] if len(sys.argv) > 1 else ""
    problems = release_problems(tag, repository=os.environ.get("GITHUB_REPOSITORY", ""))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
