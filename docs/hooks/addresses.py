"""The addresses of the site and of the repository, which mkdocs reads from pyproject.toml."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@event_priority(100)  # first: mike appends the version to the address of the site
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the addresses and, where mike builds one of several versions, the menu of versions."""
    urls = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["urls"]
    config.site_url = urls["Documentation"]
    config.repo_url = urls["Repository"]
    config.repo_name = "GitHub"
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike", "default": "latest"}
    return config


def on_post_page(output: str, **_: Any) -> str:
    """Remove the mark by which the theme asks GitHub for the number of stars: pages load nothing from other hosts."""
    return output.replace(' data-md-component="source"', "")
