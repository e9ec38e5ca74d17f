"""The page in a browser: layout in both colour schemes and widths, and interaction."""

from __future__ import annotations

from pathlib import Path

import pytest

from .browser import Browser, Page
from .synthetic_reports import HOSTILE_NAME

SIZES = [(1280, False), (1280, True), (360, False), (360, True)]

# The contrast of a text with its background: the ratio of their luminances, as WCAG defines it.
CONTRAST = """
(selector => {
  const element = document.querySelector(selector);
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  let ground = element;
  while (ground && (numbers(getComputedStyle(ground).backgroundColor)[3] === 0)) ground = ground.parentElement;
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, place) => sum + v * [0.2126, 0.7152, 0.0722][place], 0);
  const style = getComputedStyle(element);
  const ink = light(numbers(element.closest("svg") ? style.fill : style.color));
  const paper = light(numbers(getComputedStyle(ground || document.body).backgroundColor));
  return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
})("%s")
"""


def overflow(page: Page) -> int:
    """Return the number of pixels by which the page is wider than its window."""
    return int(page.run("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def shown(page: Page, selector: str) -> int:
    """Return the number of elements that are visible."""
    return int(page.run(f"[...document.querySelectorAll({selector!r})].filter(e => e.getClientRects().length).length"))


def tip(page: Page) -> str:
    return str(page.run("document.querySelector('.tip.shown')?.textContent ?? ''"))


@pytest.fixture
def page(browser: Browser, synthetic_page: Path) -> Page:
    return browser.open(synthetic_page)


@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_no_errors_no_overflow_no_network(browser, synthetic_page, width, dark):
    page = browser.open(synthetic_page, width=width, dark=dark)
    for tab in (0, 1):
        page.run(f"document.querySelectorAll('.tabs button')[{tab}].click()")
        page.run("document.querySelectorAll('details').forEach(each => (each.open = true))")
        assert overflow(page) == 0
    assert page.errors == []
    assert [address for address in page.requests if not address.startswith(("data:", synthetic_page.as_uri()))] == []


def test_the_test_above_can_fail(browser, synthetic_page):
    page = browser.open(synthetic_page, width=360)
    page.run("document.querySelector('h1').style.width = '500px'")
    assert overflow(page) > 100
    page.run("console.error('planted')")
    assert any("planted" in error for error in page.errors)
    page.run("fetch('https://example.org').catch(() => 0)")
    assert page.errors[1:], "the content security policy of the page refuses it"


@pytest.mark.parametrize("dark", [False, True])
def test_colour_scheme_and_contrast(browser, synthetic_page, dark):
    page = browser.open(synthetic_page, dark=dark)
    red, green, blue = page.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (red + green + blue < 150) == dark
    for selector in (
        "h1",
        "dt",
        ".note",
        ".chart text",
        ".tabs button:not([aria-selected=true])",
        "td",
        "a",
        ".list text",
    ):
        assert page.run(CONTRAST % selector) >= 4.5, selector


def test_language_title_and_labels(page):
    assert page.run("document.documentElement.lang") == "en"
    assert page.run("document.title") == "ranked, scored <i>&: report"
    unnamed = "[...document.querySelectorAll('svg[role=img]')].filter(e => !e.getAttribute('aria-label')).length"
    assert page.run(unnamed) == 0
    controls = "[...document.querySelectorAll('input, select')].filter(e => !e.closest('label')).length"
    assert page.run(controls) == 0


def test_names_are_escaped(page):
    assert page.run("window.hacked") is None
    assert page.run(f"[...document.querySelectorAll('th')].some(e => e.textContent === {HOSTILE_NAME!r})") is True
    assert page.run("document.querySelectorAll('img').length") == 0
    assert page.run("document.querySelector('.legend').textContent") == "rankedscored <i>&"


def test_the_slider_hides_boxes(page):
    first = "#run-0 .detection"
    boxes, before = int(page.run(f"document.querySelectorAll('{first}').length")), shown(page, first)
    assert 0 < before < boxes, "at first, those with at least the stored threshold"

    def slide(value: int) -> None:
        page.run(
            f"(s => {{ s.value = {value}; s.dispatchEvent(new Event('input')) }})(document.querySelector('.score'))"
        )

    slide(0)
    assert shown(page, first) == boxes
    slide(1000)
    assert shown(page, first) == 1, "only the best"
    counts = page.run("[...document.querySelectorAll('#run-0 .counts')].map(e => parseInt(e.textContent)).join()")
    assert sum(map(int, counts.split(","))) <= 1, "the counts follow"
    assert shown(page, "#run-0 .object.detected") <= 1 < shown(page, "#run-0 .object.missed")
    page.run("document.querySelector('#run-0 .reset').click()")
    assert shown(page, first) == before
    assert page.run("document.querySelector('#run-0 output').textContent") == "0.5"


def test_the_class_filter_and_the_ground_truth(page):
    before = shown(page, "#run-0 .detection"), shown(page, "#run-0 .object")
    category = page.run("document.querySelector('#run-0 .object').dataset.class")
    page.run(
        f"(s => {{ s.value = '{category}'; s.dispatchEvent(new Event('change')) }})(document.querySelector('.class'))"
    )
    others = f"#run-0 :is(.detection, .object):not([data-class='{category}'])"
    assert shown(page, others) == 0
    assert 0 < shown(page, f"#run-0 .object[data-class='{category}']") < before[1]
    page.run("document.querySelector('#run-0 .ground-truth').click()")
    assert shown(page, "#run-0 .object") == 0


def test_pointing_at_a_box_shows_its_tip(page):
    page.point("#run-0 .detection.correct:not([hidden]) .box", x=0.5, y=0.0)
    text = tip(page)
    assert "score 0." in text
    assert "IoU 0." in text or "ground truth:" in text, "or the object at the same edge"
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert tip(page) == ""


def test_arrow_keys_move_from_box_to_box(page):
    def highlighted() -> int:
        boxes = "[...document.querySelectorAll('#run-0 .image :is(.detection, .object)')]"
        return int(page.run(f"{boxes}.findIndex(e => e.matches('.here'))"))

    page.run("document.querySelector('#run-0 .image svg').focus()")
    page.press("ArrowRight")
    first = highlighted()
    assert tip(page)
    page.press("ArrowRight")
    assert tip(page)
    assert 0 <= first < highlighted()
    assert page.run("document.querySelectorAll('.image .here').length") == 1
    page.press("Escape")
    assert tip(page) == ""


def test_charts_react_to_the_pointer_and_the_legend(page):
    page.point(".chart svg", x=0.99)
    assert tip(page).splitlines() == ["step 100", "ranked: 30", "scored <i>&: 32"]
    page.run("document.querySelectorAll('.legend button')[1].click()")
    page.point(".chart svg", x=0.98)
    assert tip(page).splitlines() == ["step 100", "ranked: 30"]
    assert shown(page, ".chart [data-run='1']") == 0
    assert page.run("document.querySelectorAll('.legend button')[1].getAttribute('aria-pressed')") == "false"
    page.run("document.querySelectorAll('.legend button')[1].click()")
    assert shown(page, ".chart [data-run='1']") > 0


def test_precision_and_recall_show_the_score(page):
    page.point("#run-0 .chart svg", x=0.4)
    lines = tip(page).splitlines()
    assert lines[0].startswith("recall 0.")
    assert [line.partition(":")[0] for line in lines[1:]] == ["IoU 0.5", "IoU 0.75"]
    assert all("score 0." in line for line in lines[1:])
    assert shown(page, "#run-0 .mark") == 4, "the threshold on both curves, of boxes and masks"


def test_ranked_lists_can_be_chosen(page):
    assert shown(page, ".list") == 1
    page.point(".list:not([hidden]) .item.positive")
    assert "positive" in tip(page)
    assert "gradient" in tip(page)
    before = page.run("document.querySelector('.list:not([hidden]) figcaption').textContent")
    change = "s => { s.value = 'detections'; s.dispatchEvent(new Event('change')) }"
    page.run(f"({change})(document.querySelector('.list-source'))")
    after = page.run("document.querySelector('.list:not([hidden]) figcaption').textContent")
    assert "buckets" in before
    assert "detections" in after
    assert shown(page, ".list") == 1


def test_tabs_show_one_run_at_a_time(page):
    assert shown(page, ".panel") == 1
    page.run("document.querySelector('.tabs button').focus()")
    page.press("ArrowRight")
    assert page.run("[...document.querySelectorAll('.panel')].map(e => e.hidden).join()") == "true,false"
    assert page.run("document.activeElement.textContent") == "scored <i>&"


def test_the_page_works_without_scripts(browser, synthetic_page):
    page = browser.open(synthetic_page, scripts=False)
    assert shown(page, ".panel") == 2, "all runs, one below another"
    assert shown(page, ".controls") == shown(page, ".legend") == 0, "no controls without effect"
    assert shown(page, ".chart path.line") > 4
    assert shown(page, "#run-0 .detection") > 0
    assert shown(page, ".list") == 2
    assert overflow(page) == 0
