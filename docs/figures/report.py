"""Screenshots of a report for the documentation: python -m docs.figures.report report.html (needs Chromium)."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from docs.figures.theme import ASSETS
from tests.report.browser import Browser, started

WIDTH, HEIGHT = 1120, 5000  # so high that nothing has to be scrolled to
PARTS = {
    "curves": "#curves .charts",
    "images": "#run-0 .gallery",
    "ranking": "#run-0 .ranking",
    "scored": "#run-1 .ranking",
}


def take(browser: Browser, report: Path, *, dark: bool) -> None:
    """Take a screenshot of each part; the second ranked list is from the second run."""
    page = browser.open(report, width=WIDTH, height=HEIGHT, dark=dark)
    for name, selector in PARTS.items():
        page.run(f"document.querySelectorAll('.tabs button')[{int(name == 'scored')}].click()")
        if name == "curves":
            page.point(".chart svg", x=0.55)
        elif name == "images":
            page.point("#run-0 .detection.correct:not([hidden]) .box", y=0.0)
        else:
            page.point(f"{selector} .list:not([hidden]) .item.negative", y=0.2)
        path = ASSETS / f"report-{name}-{'dark' if dark else 'light'}.webp"
        page.screenshot(path, selector=selector, quality=80)


def main() -> None:
    with tempfile.TemporaryDirectory() as profile, started(Path(profile)) as browser:
        for dark in (False, True):
            take(browser, Path(sys.argv[1]), dark=dark)


if __name__ == "__main__":
    main()
