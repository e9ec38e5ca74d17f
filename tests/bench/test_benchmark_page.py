"""The tool that renews the tables of the benchmark page."""

import re

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("torchvision")

from bucketrank.bench.detectors.detector_report import to_markdown as detectors_to_markdown
from bucketrank.bench.losses.loss_report import to_markdown as losses_to_markdown
from docs.figures.benchmark_tables import BLOCK, PAGE, renew, sections
from tests.bench import test_detectors
from tests.bench.fixed_time_bench import fixed_time_bench

DOCUMENTS = {
    "losses.md": losses_to_markdown(fixed_time_bench(), "losses.svg"),
    "detectors.md": detectors_to_markdown(test_detectors.fixed_time_bench(), "detectors.svg"),
}


def test_every_block_of_the_page_is_a_section_that_the_benchmark_writes():
    text = PAGE.read_text(encoding="utf-8")
    blocks = [(match[1], match[2]) for match in BLOCK.finditer(text)]
    assert len(blocks) == text.count("<!-- end -->") == 9
    assert [block for block in blocks if block[1] not in sections(DOCUMENTS[block[0]])] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_new_measurement_replaces_the_blocks_of_its_file_only(name):
    text = PAGE.read_text(encoding="utf-8")
    page = renew(text, name, DOCUMENTS[name])
    (command,) = re.findall(r"^`(bucketrank bench .*)`$", DOCUMENTS[name], re.MULTILINE)
    assert f"<!-- {name}: command and machine -->\n\n`{command}`\n" in page
    before = [match[0] for match in BLOCK.finditer(text) if match[1] != name]
    assert [match[0] for match in BLOCK.finditer(page) if match[1] != name] == before
    assert BLOCK.sub("", page) == BLOCK.sub("", text)
    assert renew(page, name, DOCUMENTS[name]) == page


def test_a_section_that_does_not_exist_is_an_error():
    with pytest.raises(KeyError, match="Targets"):
        renew("<!-- losses.md: Targets -->\n\n<!-- end -->\n", "losses.md", "# Losses\n\n## Notes\n\nnone\n")
