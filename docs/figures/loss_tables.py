"""Renew the tables of losses on the results page and in README: python -m docs.figures.loss_tables.

The tables come from ``losses-atss.json``, the ``losses.json`` of ``bucketrank study losses``. A block that begins with
``<!-- losses: NAME -->`` and ends with ``<!-- end -->`` gets the table NAME. The text around the blocks has to be read
again by a human.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bucketrank.bench.bench_documents import markdown_table
from bucketrank.study.loss_document import COLUMNS, STEP_COLUMNS
from docs.figures.losses import NAMES, STUDY

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md")
BLOCK = re.compile(r"(?<=^<!-- losses: )([\w ]+) -->\n.*?(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)


def tables(study: dict[str, Any]) -> dict[str, str]:
    """Return the Markdown tables of a study by name: the headline, every data set, and the time of a step."""
    names = ["data", "RS minus", "after 250 steps", "", "after 1,000 steps", ""]
    headline = [[NAMES[row[0]], *row[1:]] for each in study["sets"] for row in each["headline"]]
    found = {"headline": markdown_table(names, headline)}
    found |= {NAMES[each["data"]]: markdown_table(COLUMNS, each["rows"]) for each in study["sets"]}
    return found | {"steps": markdown_table([*STEP_COLUMNS, "ratio to focal"], study["steps"]["rows"])}


def renew(page: str, study: dict[str, Any]) -> str:
    """Return the page with the tables of the study in its blocks; KeyError if one does not exist."""
    available = tables(study)
    return BLOCK.sub(lambda match: f"{match[1]} -->\n\n{available[match[1]]}\n\n", page)


if __name__ == "__main__":
    for path in PAGES:
        renewed = renew(path.read_text(encoding="utf-8"), json.loads(STUDY.read_text(encoding="utf-8")))
        path.write_text(renewed, encoding="utf-8")
