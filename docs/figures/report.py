"""Screenshots of a report for the documentation: python -m docs.figures.report report.html (needs Chromium)."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from docs.figures.theme import ASSETS
from tests.report.browser import Browser, started

WIDTH, HEIGHT = 1000, 9000  # so high that nothing has to be scrolled to
MARGIN = 8  # pixels around a part
# For each picture: the number of the run, and the first and the last element to show.
PARTS = {
    "curves": (0, "#curves .legend", "#curves .charts"),
    "images": (0, "#run-0 .keys", "#run-0 .images"),
    "ranking": (0, "#run-0 p.keys:has(+ .ranking)", "#run-0 .ranking"),
    "scored": (1, "#run-1 p.keys:has(+ .ranking)", "#run-1 .ranking"),
}


def take(browser: Browser, report: Path, *, dark: bool) -> None:
    """Take a screenshot of each part with its legend; the pointer rests outside, so that no tooltip covers it."""
    page = browser.open(report, width=WIDTH, height=HEIGHT, dark=dark)
    for name, (run, first, last) in PARTS.items():
        page.run(f"document.querySelectorAll('.tabs button')[{run}].click()")
        path = ASSETS / f"report-{name}-{'dark' if dark else 'light'}.webp"
        page.screenshot(path, selector=first, until=last, margin=MARGIN, quality=80)


def main() -> None:
    with tempfile.TemporaryDirectory() as profile, started(Path(profile)) as browser:
        for dark in (False, True):
            take(browser, Path(sys.argv[1]), dark=dark)


if __name__ == "__main__":
    main()
