"""Screenshots of every page of the built site: python -m docs.figures.pages SITE OUT [NAME ...] (needs Chromium).

Each page is taken in both colour schemes, 1280 and 390 pixels wide, to be looked at before a release.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.report.browser import Browser, started

WIDTHS = (1280, 390)
TALLEST = 15_000  # pixels; WebP allows 16,383


def main() -> None:
    site, out = Path(sys.argv[1]), Path(sys.argv[2])
    names = sys.argv[3:]  # all pages without names
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, started(Path(profile)) as browser:
        for page in sorted(site.rglob("*.html")):
            name = page.relative_to(site).with_suffix("").as_posix().replace("/", "-")
            if page.name == "404.html" or "assets" in page.parts or (names and name not in names):
                continue
            for width in WIDTHS:
                for dark in (False, True):
                    take(browser, page, out / f"{name}-{width}-{'dark' if dark else 'light'}.webp", width, dark=dark)


def take(browser: Browser, page: Path, path: Path, width: int, *, dark: bool) -> None:
    """Take a screenshot of a whole page; report a page that is wider than the window."""
    tab = browser.open(page, width=width, dark=dark)
    root = "document.documentElement"
    wide, height = tab.run(f"[{root}.scrollWidth, {root}.scrollHeight]")
    if wide > width:
        print(f"{path.stem}: {wide} pixels wide")
    size = {"width": width, "height": min(height, TALLEST), "deviceScaleFactor": 1, "mobile": width < 600}
    tab.call("Emulation.setDeviceMetricsOverride", **size)
    tab.screenshot(path, quality=60)
    tab.run("localStorage.clear()")  # the theme stores the scheme of the first page there
    tab.call("Page.close")


if __name__ == "__main__":
    main()
