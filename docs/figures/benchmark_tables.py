"""Read the tables of the benchmark page, and renew them.

``python -m docs.figures.benchmark_tables FOLDER/losses.md FOLDER/detectors.md`` renews them.

``python -m benchmarks losses`` and ``detectors`` write these files; ``python -m benchmarks results FILE.json --out
FOLDER`` writes them again. A block of the page that begins with ``<!-- losses.md: TITLE -->`` and ends with
``<!-- end -->`` gets the section TITLE of that file. Read the text between the blocks again afterwards.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "benchmark.md"
BLOCK = re.compile(r"(?<=^<!-- )(\w+\.md): ([^\n]+) -->\n.*?(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)
# The name of the part above the first section, without title and figure: the command and the machine.
OPENING = "command and machine"


def sections(markdown: str) -> dict[str, str]:
    r"""Return the sections of a document by title, and its opening.

    >>> sections("# Title\n\n`command`\n\n![Figure](a.svg)\n\n## One\n\ntext\n")
    {'command and machine': '`command`', 'One': 'text'}
    """
    opening, *parts = re.split(r"^## ", markdown, flags=re.MULTILINE)
    lines = [part for part in opening.strip().split("\n\n") if not part.startswith(("# ", "!["))]
    titled = (part.partition("\n") for part in parts)
    return {OPENING: "\n\n".join(lines), **{title: body.strip() for title, _, body in titled}}


def renew(page: str, name: str, markdown: str) -> str:
    """Return the page with the sections of the document ``name`` in its blocks; KeyError if one does not exist."""
    available = sections(markdown)

    def block(match: re.Match[str]) -> str:
        if match[1] != name:
            return match[0]
        return f"{match[1]}: {match[2]} -->\n\n{available[match[2]]}\n\n"

    return BLOCK.sub(block, page)


def read_table(title: str) -> list[dict[str, str]]:
    """Return the rows of the table in the block TITLE of the page, each as a dict from column to cell."""
    blocks = {match[2]: match[0] for match in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))}
    lines = [line for line in blocks[title].splitlines() if line.startswith("|")]
    names, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(names, row, strict=True)) for row in rows]


def milliseconds(cell: str) -> float:
    """Return the time at the beginning of a cell, or its estimate.

    >>> milliseconds("395 µs [311, 489]"), milliseconds("skipped, ≈ 2.48 min")
    (0.395, 148800.0)
    """
    number, unit = re.findall(r"([\d.,]+) (µs|ms|s|min)\b", cell)[0]
    return float(number.replace(",", "")) * {"µs": 1e-3, "ms": 1.0, "s": 1e3, "min": 6e4}[unit]


def main(paths: list[str]) -> None:
    """Write the page again with the tables of the given files."""
    page = PAGE.read_text(encoding="utf-8")
    for path in map(Path, paths):
        page = renew(page, path.name, path.read_text(encoding="utf-8"))
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
