"""The package's description on PyPI: README with absolute links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

CODE_BLOCK = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
# The target of a link or an image, in Markdown or HTML. An anchor or an address with a scheme is not relative.
RELATIVE_LINK = re.compile(r'(?P<before>\]\(|(?:src|srcset|href)=")(?!#|[a-z]+:)(?P<path>[^)\s"]+)')
IMAGE_SUFFIXES = {".gif", ".jpg", ".png", ".svg", ".webp"}


class CustomMetadataHook(MetadataHookInterface):
    """Set the readme, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Read README.md and resolve its links against the repository at the tag of this version."""
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = with_absolute_links(readme, repository=metadata["urls"]["Repository"], tag=f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_absolute_links(text: str, *, repository: str, tag: str) -> str:
    """Return Markdown whose relative links lead to the files of a GitHub repository at a tag.

    On GitHub, ``../../`` leads from README to the repository's own pages, for example to its workflows.
    """

    def absolute(match: re.Match[str]) -> str:
        path = match["path"]
        if path.startswith("../../"):
            return f"{match['before']}{repository}/{path.removeprefix('../../')}"
        view = "raw" if Path(path).suffix in IMAGE_SUFFIXES else "blob"
        return f"{match['before']}{repository}/{view}/{tag}/{path}"

    prose_and_code = CODE_BLOCK.split(text)  # the odd parts are code
    prose_and_code[::2] = [RELATIVE_LINK.sub(absolute, prose) for prose in prose_and_code[::2]]
    return "".join(prose_and_code)
