"""The page as a file: complete, self-contained and with all names escaped."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources

import numpy as np
import pytest
import torch
from faster_coco_eval.core import mask as rle_codec

from bucketrank.report import chart
from bucketrank.report.chart import Html, data, join, tag
from bucketrank.report.images import outline
from bucketrank.report.page import SCRIPTS, render_page
from bucketrank.report.run_folder import Columns

from .synthetic_reports import HOSTILE_NAME, synthetic_run, write_data

VOID = {"meta", "input", "br", "link", "img"}


class PageContents(HTMLParser):
    """The elements, texts, ids, scripts and external addresses of a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.texts: list[str] = []
        self.elements: list[str] = []
        self.ids: list[str] = []
        self.loaded: list[str] = []
        self.scripts: list[tuple[str | None, str]] = []
        self._script_type: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for key, value in attrs:
            if key == "id":
                self.ids.append(str(value))
            if key in ("src", "href", "xlink:href") and not str(value).startswith(("#", "data:")):
                self.loaded.append(str(value))
            if tag == "script" and key == "type":
                self._script_type = value

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append((self._script_type, data))
        else:
            self.texts.append(data)


@pytest.fixture(scope="module")
def parsed(synthetic_page) -> PageContents:
    contents = PageContents()
    contents.feed(synthetic_page.read_text(encoding="utf-8"))
    return contents


def test_every_element_is_closed_and_nothing_is_loaded(parsed):
    assert parsed.open == []
    assert parsed.loaded == []
    assert len(set(parsed.ids)) == len(parsed.ids)
    assert "img" not in parsed.elements


def test_names_are_escaped(parsed):
    assert HOSTILE_NAME in parsed.texts
    assert all("hacked" not in text for _, text in parsed.scripts), "no name is in a script"
    with_names = [text for script_type, text in parsed.scripts if script_type == "application/json"]
    assert any("scored <i>&" in json.loads(text)["lines"][-1]["name"] for text in with_names)
    assert all("<" not in text for text in with_names)


def test_only_our_own_script_may_run(synthetic_page, parsed):
    (script,) = [text for script_type, text in parsed.scripts if script_type == "module"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in synthetic_page.read_text(encoding="utf-8")


def test_an_image_is_stored_once(synthetic_page):
    text = synthetic_page.read_text(encoding="utf-8")
    stored = re.findall(r'<image id="([^"]+)"', text)
    used = re.findall(r'<use href="#([^"]+)"', text)
    assert sorted(set(used)) == sorted(stored)
    assert len(used) == 12 > len(stored), "six images of two runs"
    assert len(text) < 1_000_000


def test_the_best_value_is_bold_only_if_runs_are_comparable(synthetic_data, tmp_path):
    other = write_data(tmp_path / "other", images=4)
    one, two = synthetic_run(synthetic_data, "one"), synthetic_run(synthetic_data, "two", seed=1)
    assert "<b>" in render_page([one, two]).partition('id="numbers"')[2].partition("</section>")[0]
    unevaluated = replace(two, measurement=None, folder=replace(two.folder, validation=Columns()))
    assert "<b>" in render_page([one, two, unevaluated]).partition('id="numbers"')[2].partition("</section>")[0]
    measured = two.measurement
    assert measured is not None
    tuned = replace(two, measurement=replace(measured, split=replace(measured.split, tuning="val", share=0.5)))
    assert "<b>" not in render_page([one, tuned]).partition('id="numbers"')[2].partition("</section>")[0]
    three = synthetic_run(other, "three", seed=2)
    assert "<b>" not in render_page([one, three]).partition('id="numbers"')[2].partition("</section>")[0]


def test_many_runs_have_a_short_heading_and_distinct_lines(synthetic_data):
    runs = [synthetic_run(synthetic_data, f"run-{number}", seed=number) for number in range(9)]
    text = render_page(runs)
    assert "<h1>9 runs</h1>" in text
    first, last = (re.findall(f'<g class="series c0" data-run="{run}"><path [^>]+>', text)[0] for run in (0, 8))
    assert "dashed" in last
    assert "dashed" not in first


def test_the_assets_are_in_the_package():
    folder = resources.files("bucketrank.report").joinpath("assets")
    for name in ("page.html", "page.css", *SCRIPTS):
        text = folder.joinpath(name).read_text(encoding="utf-8")
        assert "</" not in text or name == "page.html", "it would close the element around it"


def test_markup_escapes_plain_text():
    assert tag("p", "<b>", Html("<i>x</i>"), title='"&') == '<p title="&quot;&amp;">&lt;b&gt;<i>x</i></p>'
    assert tag("rect", x=1.0, hidden=True, y=None, class_="a") == '<rect x="1" hidden class="a"/>'
    assert join("a<", Html("<br/>")) == "a&lt;<br/>"
    assert json.loads(data(["</script>"])[len('<script type="application/json">') : -len("</script>")]) == ["</script>"]
    with pytest.raises(ValueError, match="JSON"):
        data([float("nan")])


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.0123), (-5.3, 7.1), (99, 100), (0, 12345), (1e-9, 2e-9)])
def test_ticks_are_few_and_in_range(low, high):
    values = chart.ticks(low, high, max_count=5)
    assert 1 < len(values) <= 5
    assert low - 1e-9 * abs(low) <= values[0] < values[-1] <= high * (1 + 1e-9)


def test_charts_without_points_or_with_equal_values():
    assert "No data." in chart.draw_chart(chart.Chart("loss", "step", "", [chart.ChartLine("run", [])]))
    flat = chart.draw_chart(chart.Chart("loss", "step", "", [chart.ChartLine("run", [(1.0, 0.0), (2.0, 0.0)])]))
    assert "nan" not in flat


def corners(path: str) -> torch.Tensor:
    return torch.tensor([[float(x), float(y)] for x, y in re.findall(r"([\d.]+),([\d.]+)", path)])


def test_an_outline_follows_its_mask():
    mask = np.zeros((100, 200), dtype=np.uint8)
    mask[20:60, 40:120] = 1
    rle = rle_codec.encode(np.asfortranarray(mask))
    stored = {"size": list(rle["size"]), "counts": rle["counts"].decode()}
    points = corners(outline(stored, (100, 200), (50, 100)))
    assert points.min(0).values.tolist() == pytest.approx([20, 10], abs=0.6)
    assert points.max(0).values.tolist() == pytest.approx([60, 30], abs=0.6)


def test_outlines_at_the_edge_and_without_a_mask():
    whole = outline([[0, 0, 100, 0, 100, 50, 0, 50]], (50, 100), (50, 100))
    assert corners(whole).max(0).values.tolist() == [100, 50]
    assert whole.endswith("Z")
    assert outline([], (50, 100), (50, 100)) == outline(None, (50, 100), (50, 100)) == ""
    two = outline([[0, 0, 20, 0, 20, 20, 0, 20], [50, 10, 90, 10, 90, 40, 50, 40]], (50, 100), (50, 100))
    assert two.count("Z") == 2
