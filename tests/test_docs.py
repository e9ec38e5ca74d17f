"""What README and docs show: pages that exist and code that runs."""

import doctest
import re
from pathlib import Path

import pytest
import torch

from bucketrank.catalogue.registry import DETECTORS, LOSSES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def test_navigation_names_every_page_once():
    named = re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md"))


def run_blocks(text: str, name: str) -> int:
    """Run the python blocks of a page in order, in one namespace; the outputs shown must be those that come."""
    torch.manual_seed(0)
    namespace: dict[str, object] = {}
    blocks = BLOCK.findall(text)
    for kind, code in blocks:
        if kind == "python":
            exec(compile(code, name, "exec"), namespace)
        else:
            test = doctest.DocTestParser().get_doctest(code, namespace, name, name, 0)
            report: list[str] = []
            doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append, clear_globs=False)
            assert not report, "".join(report)
            namespace = test.globs
    return len(blocks)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_on_the_page_runs(page):
    # The losses and detectors that a page registers must not exist on the next page.
    with LOSSES.restored(), DETECTORS.restored():
        run_blocks(page.read_text(), page.name)


def test_that_test_bites():
    with pytest.raises(AssertionError, match="Expected"):
        run_blocks("```pycon\n>>> 1 + 1\n3\n```\n", "planted")
    with pytest.raises(ZeroDivisionError):
        run_blocks("```python\n1 / 0\n```\n", "planted")
