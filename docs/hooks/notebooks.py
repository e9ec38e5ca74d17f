"""Shows the notebooks of ``examples/`` with their outputs.

The cells replace a comment that names the file, and what follows it: a link to the notebook, for readers on GitHub.
Figures become images for light and dark pages: the notebooks draw with the colours of ``docs/figures/theme.py``.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # for docs.figures
from docs.figures.palette import PALETTES  # noqa: E402

MARKER = re.compile(r"<!-- notebook: (\S+) -->.*", re.DOTALL)
WHITE = "#ffffff"


def on_files(files: Files, *, config: Any) -> Files:
    """Add the notebooks to the site, for download."""
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the comment, and what follows it, by the cells of the notebook."""
    return MARKER.sub(lambda match: to_markdown(ROOT / match[1]), markdown)


def to_markdown(path: Path) -> str:
    """Return the cells of a notebook, with their outputs, as Markdown."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts.append(f"```python\n{_without_setup(source)}\n```")
            parts += [_output(output) for output in cell["outputs"]]
        if len(parts) == 1:  # below the title
            parts.append(f"This page shows the notebook `{path.relative_to(ROOT)}` ([download]({path.name})).")
    return "\n\n".join(part for part in parts if part)


def _without_setup(source: str) -> str:
    """Leave out the style of the figures, which says nothing about the subject."""
    return source.partition("\n%config")[0].rstrip()


def _output(output: dict[str, Any]) -> str:
    if "text" in output:
        return f"```text\n{''.join(output['text']).rstrip()}\n```"
    data = output.get("data", {})
    if "image/svg+xml" in data:
        svg = "".join(data["image/svg+xml"])
        return "\n".join(_image(_coloured(svg, scheme), scheme) for scheme in PALETTES)
    if "image/png" in data:
        return f'<img class="output" alt="Figure" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    return ""


def _coloured(svg: str, scheme: str) -> str:
    """Return the figure without its white background, in the colours of a page scheme."""
    svg = svg.replace(f"fill: {WHITE}", "fill: none")
    for light, own in zip(PALETTES["light"].colours, PALETTES[scheme].colours, strict=True):
        svg = svg.replace(light, own)
    return svg


def _image(svg: str, scheme: str) -> str:
    source = base64.b64encode(svg.encode()).decode()
    return f'<img class="output" alt="Figure" src="data:image/svg+xml;base64,{source}#only-{scheme}">'
