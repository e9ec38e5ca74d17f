"""README and docs: pages, links and anchors that exist, and code that runs and fits on a page."""

import doctest
import re
from pathlib import Path

import pytest
import torch

from bucketrank.settings.registry import DETECTORS, LOSSES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
FENCE = re.compile(r"^( *)```[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"(?:\]\(|\b(?:href|src|srcset)=\")([^()\"\s]+)[)\"]")  # in Markdown or HTML
HEADING = re.compile(r"^#+ +(.+?)(?: *\{ *#([\w-]+) *\})?$", re.MULTILINE)
# Ends of the addresses of figures for light and dark pages; GitHub knows the second pair only.
SCHEMES = {"only-light", "only-dark", "gh-light-mode-only", "gh-dark-mode-only", ""}
# Syntax of mkdocs that GitHub shows as it is written: admonitions, API entries, formulas, attributes; and figures for
# light or dark pages, which GitHub shows on both.
ONLY_MKDOCS = re.compile(r"^ *(?:!!!|\?\?\?\+?|:::) .*$|\\\(|\\\[|\{ *[.:#][^}]*\}|#only-(?:light|dark)", re.MULTILINE)
WIDEST = 85  # columns of a code block that a page shows without scrolling


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


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, by the rule of GitHub for README and of mkdocs for the other pages."""
    on_github = page.name == "README.md"
    names: list[str] = []
    for title, explicit in HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        slug = re.sub(r"[^\w\s-]", "", plain).strip()
        slug = explicit or (slug.replace(" ", "-") if on_github else re.sub(r"[-\s]+", "-", slug))
        count = sum(name == slug or re.fullmatch(rf"{re.escape(slug)}[-_]\d+", name) is not None for name in names)
        names.append(f"{slug}{'-' if on_github else '_'}{count}" if count else slug)
    return set(names)


def broken_links(page: Path) -> list[str]:
    """Return the links of a page to files and anchors in this repository that do not exist."""
    text = INLINE_CODE.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))
    broken = []
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):  # https: and the like
            continue
        path, _, anchor = link.partition("#")
        # On GitHub, ../../actions/workflows/ in README leads to the runs of a workflow.
        path = re.sub(r"^\.\./\.\./actions/workflows/([\w-]+\.yml).*", r".github/workflows/\1", path)
        target = (page.parent / path).resolve() if path else page
        known = anchors(target) if target.is_file() and target.suffix == ".md" else SCHEMES
        if not target.exists() or (anchor and anchor not in known):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_anchors_exist(page):
    assert broken_links(page) == []


def test_broken_links_are_noticed(tmp_path):
    other = "# Other\n\n## Rank & Sort\n\n## Rank & Sort\n"
    (tmp_path / "other.md").write_text(other, encoding="utf-8")
    links = "[a](other.md) [b](other.md#rank-sort) [c](other.md#rank-sort_1) [d](https://example.org) `[e](none.md)`\n"
    broken = '[f](none.md) [g](other.md#rank--sort) [h](#nowhere) [i](other.md#rank-sort_2) <a href="none.html">j</a>\n'
    (tmp_path / "page.md").write_text(links + "```\n[k](none.md)\n```\n" + broken, encoding="utf-8")
    expected = ["none.md", "other.md#rank--sort", "#nowhere", "other.md#rank-sort_2", "none.html"]
    assert broken_links(tmp_path / "page.md") == expected


def only_mkdocs(text: str) -> list[str]:
    """Return the syntax outside code that GitHub does not render."""
    return ONLY_MKDOCS.findall(INLINE_CODE.sub("", FENCE.sub("", text)))


def linked_from_readme() -> list[Path]:
    """Return README and the pages that it links to, which people read on GitHub."""
    links = LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    return [ROOT / "README.md", *sorted({ROOT / link.partition("#")[0] for link in links if ".md" in link})]


@pytest.mark.parametrize("page", linked_from_readme(), ids=lambda page: page.name)
def test_pages_that_readme_links_to_are_legible_on_github(page):
    assert only_mkdocs(page.read_text(encoding="utf-8")) == []


def test_syntax_of_mkdocs_is_noticed():
    text = "!!! note\n    text\n::: bucketrank\n\\(x\\) ![a](b.svg){ .third } ![c](d.svg#only-dark) `{ .code }` $x_{i}$"
    assert only_mkdocs(text) == ["!!! note", "::: bucketrank", "\\(", "{ .third }", "#only-dark"]


def wide_lines(text: str) -> list[str]:
    """Return the lines of code blocks that are wider than a page shows."""
    return [line for _, code in FENCE.findall(text) for line in code.splitlines() if len(line) > WIDEST]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_blocks_fit_on_the_page(page):
    assert wide_lines(page.read_text(encoding="utf-8")) == []


def test_wide_lines_are_noticed():
    text = f"{'w' * 90}\n```python\n{'a' * 85}\n{'b' * 86}\n```\n- a list\n  ```\n  {'c' * 84}\n  ```\n"
    assert [line.strip()[0] for line in wide_lines(text)] == ["b", "c"]
