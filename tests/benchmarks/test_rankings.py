"""The benchmarks of many rankings: other papers' losses by their formulas, and each program from beginning to end."""

from __future__ import annotations

import io
import json
import math
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as rle
from torch import Tensor, nn
from torch.testing import assert_close

from benchmarks.rankings import omniglot, rare, scale
from benchmarks.rankings.contenders import MovingAverageAP, smooth_ap, sup_con

pytestmark = pytest.mark.usefixtures("one_thread")


def embeddings(count: int = 7, classes: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Return embeddings, labels (the last class has one member) and cosine similarities."""
    vectors = torch.randn(count, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = torch.tensor([k % (classes - 1) for k in range(count - 1)] + [classes - 1])
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    return vectors, labels, unit @ unit.T


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_smooth_ap_is_its_formula() -> None:
    vectors, labels, scores = embeddings()
    s, y = scores.tolist(), labels.tolist()
    count, losses = len(y), []
    for q in range(count):
        others = [j for j in range(count) if j != q]
        matches = [j for j in others if y[j] == y[q]]
        if not matches:
            continue
        precisions = []
        for i in matches:
            above = {j: sigmoid((s[q][j] - s[q][i]) / 0.1) for j in others if j != i}
            of_matches = sum(value for j, value in above.items() if j in matches)
            precisions.append((1 + of_matches) / (1 + sum(above.values())))
        losses.append(1 - sum(precisions) / len(precisions))
    assert_close(smooth_ap(vectors, labels, tau=0.1).item(), sum(losses) / len(losses))


def test_sup_con_is_its_formula() -> None:
    vectors, labels, scores = embeddings()
    s, y = scores.tolist(), labels.tolist()
    losses = []
    for i in range(len(y)):
        others = [j for j in range(len(y)) if j != i]
        total = sum(math.exp(s[i][j] / 0.1) for j in others)
        shares = [math.log(math.exp(s[i][j] / 0.1) / total) for j in others if y[j] == y[i]]
        if shares:
            losses.append(-sum(shares) / len(shares))
    assert_close(sup_con(vectors, labels, tau=0.1).item(), sum(losses) / len(losses))


def test_moving_averages_by_hand() -> None:
    loss = MovingAverageAP(samples=4, gamma=0.5, margin=0.6)
    logits, targets = torch.tensor([0.0, 0.0], requires_grad=True), torch.tensor([1.0, 0.0])
    value = loss(logits, targets, torch.tensor([2, 3]))
    # Both squared hinge errors are 0.6^2 = 0.36: u = 0.5 * 0.36, v = 0.5 * 0.36 / 2.
    assert_close(loss.averages[2], torch.tensor([0.18, 0.09]))
    # ((v - u) * 0.36 + v * 0.36) / (2 u^2)
    assert_close(value.item(), (0.09 - 0.18 + 0.09) * 0.36 / (2 * 0.18**2), atol=1e-6, rtol=0)
    assert loss(logits, torch.zeros(2), torch.tensor([0, 1])) == 0, "no positives"


def test_map_at_r_by_hand() -> None:
    # The network is the identity; similarities order the other five drawings of each query.
    characters = [torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), torch.tensor([[0.1, 0.9], [0.8, 0.2]])]
    # Matches among the first R: a0: a1 (1), then b1 (0): 1/2. a1: a0, b1: 1/2. a2: b0 (0), b1 (0): 0.
    # b0: a2 (0): 0. b1: a1 (0): 0.
    assert omniglot.map_at_r(nn.Identity(), characters) == pytest.approx((1 / 2 + 1 / 2 + 0 + 0 + 0) / 5)


def run(program: Any, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["program", *words])
    program.main()
    return capsys.readouterr().out


def write_drawings(path: Path, alphabets: list[str]) -> None:
    random = np.random.default_rng(0)
    with zipfile.ZipFile(path, "w") as archive:
        for alphabet in alphabets:
            for character in range(4):
                for drawing in range(4):
                    data = io.BytesIO()
                    Image.fromarray(random.integers(0, 255, (30, 30), dtype=np.uint8)).save(data, "PNG")
                    archive.writestr(f"images/{alphabet}/{character}/{drawing}.png", data.getvalue())


def test_omniglot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_drawings(tmp_path / "images_background_small1.zip", ["Greek", "Latin"])
    write_drawings(tmp_path / "images_background_small2.zip", ["Latin", "Tagalog"])
    monkeypatch.setattr(omniglot, "CLASSES", 3)
    monkeypatch.setattr(omniglot, "RATES", (1e-3,))
    out = run(omniglot, [str(tmp_path), "--steps", "2", "--seeds", "2"], monkeypatch, capsys)
    assert "8 characters to train, 4 to test" in out, "Latin is in both files"
    rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| ")]
    assert rows[0] == ["loss", "rate", "width", "mAP@R"]
    assert [row[0] for row in rows[1:]] == ["exact AP (ours)", "SmoothAP", "SupCon"]
    assert all(0 <= float(row[3].split()[0]) <= 100 for row in rows[1:])


def write_discs(folder: Path) -> None:
    """Write two grey images with a disc each, as training and as validation set."""
    (folder / "images").mkdir()
    grid = np.arange(40)
    disc = ((grid[:, None] - 20) ** 2 + (grid - 20) ** 2 < 150).astype(np.uint8)
    segmentation = rle.encode(np.asfortranarray(disc))
    segmentation["counts"] = segmentation["counts"].decode()
    Image.fromarray(disc * 200).save(folder / "images" / "disc.png")
    images = [{"id": number, "file_name": "disc.png"} for number in (1, 2)]
    annotations = [{"image_id": number, "segmentation": segmentation} for number in (1, 2)]
    for split in ("train", "val"):
        (folder / f"{split}_rle.json").write_text(json.dumps({"images": images, "annotations": annotations}))


def test_rare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_discs(tmp_path)
    pixels = rare.read_pixels(tmp_path, "val")
    contour = pixels.contour.view(2, 40, 40)[0]
    assert contour[20].nonzero()[:, 0].tolist() == [8, 32], "where row 20 enters and leaves the disc"
    samples = rare.draw(pixels, 200, 0.1, seed=0)
    assert (samples.squares.shape, int(samples.targets.sum())) == ((200, 121), 20)
    drawn = rare.batches(samples.targets, sampler=True, generator=torch.Generator().manual_seed(0))
    assert int(samples.targets[next(drawn)].sum()) == 26, "a tenth of 256"

    monkeypatch.setattr(rare, "TEST_SAMPLES", 300)
    monkeypatch.setattr(rare, "RATES", (1e-3,))
    words = [str(tmp_path), "--shares", "0.1", "0.05", "--samples", "200", "--steps", "2", "--seeds", "2"]
    out = run(rare, words, monkeypatch, capsys)
    rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| ")]
    assert rows[0] == ["loss", "10 %", "5 %", "5 %, sampler"]
    assert [row[0] for row in rows[1:]] == list(rare.LOSSES)
    assert all(0 < float(cell.split()[0]) <= 100 for row in rows[1:] for cell in row[1:])


def test_average_precision_by_hand() -> None:
    class First(nn.Module):
        def forward(self, squares: Tensor) -> Tensor:
            return squares[:, :1]

    squares = torch.tensor([[4.0], [3.0], [2.0], [1.0]])
    samples = rare.Samples(squares, torch.tensor([1.0, 0.0, 0.0, 1.0]))
    assert rare.average_precision(First(), samples) == pytest.approx((1 / 1 + 2 / 4) / 2)


@pytest.mark.slow
def test_scale(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(scale, ["--batches", "8", "--alone", "16", "--rounds", "1"], monkeypatch, capsys)
    tables = [[line.strip("| ").split(" | ") for line in part.splitlines()] for part in out.split("\n\n")[1:]]
    sizes, rankings, scopes = ([row for row in table if not row[0].startswith("---")] for table in tables)
    assert [row[0] for row in sizes] == ["B", "8", "16"]
    assert sizes[2][1] == "", "SmoothAP is not measured alone"
    assert [row[0] for row in rankings[1:]] == ["1024", "4096", "22"]
    assert [row[0] for row in scopes[1:]] == ["ap", "rs"]
