"""Read the tables of the benchmark page, and renew them.

``python -m docs.figures.benchmark_tables FOLDER/losses.md FOLDER/detectors.md`` renews them.

``python -m benchmarks losses`` and ``detectors`` write these files; ``python -m benchmarks results FILE.json --out
FOLDER`` writes them again. A block of the page that begins with ``<!-- losses.md: TITLE -->`` and ends with
``<!-- end -->`` gets the section TITLE of that file. Read the text between the blocks again afterwards. The times of
every method, too many for the page, are CSV files to which it links.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parents[1] / "benchmark.md"
# Sections of losses.md that are CSV files.
CSV_FILES = {f"{loss} loss: time": PAGE.parent / "assets" / f"losses-time-{loss.lower()}.csv" for loss in ("AP", "RS")}
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


def table_of(markdown: str) -> list[list[str]]:
    """Return the cells of the table in a section, the head first."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [head, *rows]


def write_tables(markdown: str, files: Mapping[str, Path] = CSV_FILES) -> None:
    """Write the CSV files of a document; KeyError if a section does not exist."""
    available = sections(markdown)
    for title, path in files.items():
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(table_of(available[title]))


def read_table(title: str) -> list[dict[str, str]]:
    """Return the rows of the table TITLE, from its CSV file or its block of the page, as dicts from column to cell."""
    if title in CSV_FILES:
        head, *rows = csv.reader(CSV_FILES[title].read_text(encoding="utf-8").splitlines())
    else:
        blocks = {match[2]: match[0] for match in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))}
        head, *rows = table_of(blocks[title])
    return [dict(zip(head, row, strict=True)) for row in rows]


def milliseconds(cell: str) -> float:
    """Return the time at the beginning of a cell, or its estimate.

    >>> milliseconds("395 µs [311, 489]"), milliseconds("skipped, ≈ 2.48 min")
    (0.395, 148800.0)
    """
    number, unit = re.findall(r"([\d.,]+) (µs|ms|s|min)\b", cell)[0]
    return float(number.replace(",", "")) * {"µs": 1e-3, "ms": 1.0, "s": 1e3, "min": 6e4}[unit]


def main(paths: list[str]) -> None:
    """Write the page and the CSV files again with the tables of the given files."""
    page = PAGE.read_text(encoding="utf-8")
    for path in map(Path, paths):
        document = path.read_text(encoding="utf-8")
        page = renew(page, path.name, document)
        if path.name == "losses.md":
            write_tables(document)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
