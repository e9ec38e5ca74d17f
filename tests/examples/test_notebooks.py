"""The notebooks of examples/ run, their outputs are kept, and the documentation shows them."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
LARGEST = 600_000  # bytes, with outputs
names = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# Lines that the test replaces: every cell runs, on fewer images and steps than in the outputs that are kept.
SHORTER = {
    "fine_tune_torchvision": {
        "STEPS = 200": "STEPS = 12",  # the figure shows means of ten steps
        "train=160, val=24, size=96": "train=16, val=4, size=96",
    },
    "train_in_python": {
        "epochs=12": "epochs=1",
        "train=160, val=24, size=96": "train=16, val=4, size=96",
    },
}


@names
def test_outputs_are_kept_and_small(path):
    code = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "run all cells in order"
    outputs = [output for cell in code for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert path.stat().st_size < LARGEST
    assert not re.search(r"/(home|work|tmp|Users)/", path.read_text())


@names
def test_lines_of_code_fit_the_page(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    lines = [line for cell in cells for line in "".join(cell["source"]).splitlines()]
    assert not [line for line in lines if len(line) > 85]


@names
def test_documentation_shows_the_notebook(path):
    page = ROOT / "docs" / "notebooks" / f"{path.stem}.md"
    assert f"<!-- notebook: examples/{path.name} -->" in page.read_text()


@pytest.mark.release
@pytest.mark.filterwarnings("default")  # of Jupyter's packages
@names
def test_notebook_runs(path, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel, which nbmake installs")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    text = path.read_text(encoding="utf-8")
    for line, shorter in SHORTER.get(path.stem, {}).items():
        assert text.count(line) == 1, line
        text = text.replace(line, shorter)
    notebook = nbformat.reads(text, as_version=4)
    resources = {"metadata": {"path": tmp_path}}
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources)
    client.execute()  # raises CellExecutionError if a cell fails
    assert any(output.output_type == "display_data" for cell in notebook.cells for output in cell.get("outputs", []))
