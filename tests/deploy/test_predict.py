"""From pictures to detections, in Python and by the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from faster_coco_eval import COCO
from faster_coco_eval.core import mask as rle_codec
from PIL import Image

from bucketrank.cli import main
from bucketrank.data.problems import DataError
from bucketrank.data.shapes import Shapes
from bucketrank.deploy import predict
from bucketrank.deploy.files import find_pictures, predict_files
from bucketrank.training.weights import load_model

from .made_up import CATEGORIES, CLASSES, write_weights


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model and its weights, whose threshold leaves ten detections of the first picture."""
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    model, _ = write_weights(path)
    return write_weights(path, threshold=float(predict(model, [picture()])[0]["scores"][9]))


def picture(number=0, size=(100, 80)):
    return Image.fromarray(Shapes(size=100).draw(number).pixels).resize(size)


def save(path: Path, number=0, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(number).save(path, **options)
    return path


def read(out: Path):
    return json.loads((out / "predictions.json").read_text())


def test_every_kind_of_image_gives_the_same(trained, tmp_path):
    model, _ = trained
    seen = picture()
    array = np.asarray(seen)
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    images = [save(tmp_path / "a.png"), str(tmp_path / "a.png"), seen, array, tensor, tensor / 255]
    results = predict(model, images)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])
    assert not results[0]["boxes"].requires_grad


def test_threshold_and_batch(trained):
    model, _ = trained
    images = [picture(number) for number in range(3)]
    every = predict(model, images)
    limit = float(every[0]["scores"][9])
    some = predict(model, iter(images), threshold=limit, batch=2)
    assert len(some[0]["scores"]) == 10, "the tenth score itself is not below"
    for all_, few in zip(every, some, strict=True):
        torch.testing.assert_close(few["scores"], all_["scores"][all_["scores"] >= limit])


def test_the_model_is_left_as_it_was(trained):
    model, _ = trained
    model.train()
    try:
        predict(model, [picture()])
        assert model.training
        with pytest.raises(ValueError, match="expected an array"):
            predict(model, [np.zeros((4, 4), dtype=np.uint8)])
        assert model.training, "also after an error"
    finally:
        model.eval()


def test_a_photograph_is_seen_upright(trained, tmp_path):
    model, _ = trained
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned by a quarter
    save(tmp_path / "turned.png", exif=turned)
    upright = picture().transpose(Image.Transpose.ROTATE_270)
    torch.testing.assert_close(predict(model, [tmp_path / "turned.png"]), predict(model, [upright]))


def test_from_the_command_to_the_files(trained, tmp_path, capsys):
    model, weights = trained
    threshold = load_model(weights)[1].threshold
    save(tmp_path / "in" / "a.png", 0)
    save(tmp_path / "in" / "deep" / "er" / "b.JPG", 1)
    (tmp_path / "in" / "notes.txt").write_text("no picture")
    out = tmp_path / "out"
    assert main(["predict", str(weights), str(tmp_path / "in"), "--out", str(out)]) == 0
    document = read(out)
    assert [image["file_name"] for image in document["images"]] == ["a.png", "deep/er/b.JPG"]
    assert [image["drawn"] for image in document["images"]] == ["pictures/a.jpg", "pictures/deep/er/b.jpg"]
    assert document["categories"] == [{"id": i, "name": n} for i, n in zip(CATEGORIES, CLASSES, strict=True)]
    assert document["info"]["threshold"] == threshold, "that of the weights"
    for image in document["images"]:
        with Image.open(out / image["drawn"]) as drawn:
            assert drawn.size == (640, 512), "enlarged"
        assert (image["width"], image["height"]) == (100, 80)

    (expected,) = predict(model, [tmp_path / "in" / "a.png"], threshold=threshold)
    found = [each for each in document["annotations"] if each["image_id"] == 1]
    assert len(found) == len(expected["scores"]) == 10
    x1, y1, x2, y2 = expected["boxes"][0].tolist()
    assert found[0]["bbox"] == pytest.approx([x1, y1, x2 - x1, y2 - y1], abs=1e-3)
    assert found[0]["category_id"] == CATEGORIES[int(expected["labels"][0]) - 1]
    assert found[0]["score"] == pytest.approx(float(expected["scores"][0]))
    assert (
        f"{len(document['annotations'])} detections with a score of at least {threshold:.3g} (chosen"
        in capsys.readouterr().out
    )


def test_the_json_is_read_by_cocos_tools(trained, tmp_path):
    _, weights = trained
    predict_files(weights, [save(tmp_path / "a.png")], tmp_path / "out", threshold=0)
    document = read(tmp_path / "out")
    everything = COCO(document)
    assert len(everything.anns) == len(document["annotations"]) == 100
    assert len(everything.loadRes(document["annotations"]).anns) == 100


def test_masks_are_written_as_rle(tmp_path):
    model, weights = write_weights(tmp_path / "w.safetensors", name="mask_rcnn")
    predict_files(weights, [save(tmp_path / "a.png")], tmp_path / "out", threshold=0)
    (expected,) = predict(model, [tmp_path / "a.png"])
    found = read(tmp_path / "out")["annotations"][0]["segmentation"]
    assert found["size"] == [80, 100]
    np.testing.assert_array_equal(rle_codec.decode(found), expected["masks"][0, 0].numpy() > 0.5)


def test_what_cannot_be_read_is_reported_and_left_out(trained, tmp_path, capsys):
    _, weights = trained
    save(tmp_path / "in" / "good.png")
    (tmp_path / "in" / "broken.png").write_bytes(b"no picture")
    words = [
        "predict",
        str(weights),
        str(tmp_path / "in"),
        str(tmp_path / "missing.png"),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(words) == 1
    printed = capsys.readouterr().out
    assert "broken.png" in printed
    assert "missing.png" in printed
    assert "2 files could not be read" in printed
    assert [image["file_name"] for image in read(tmp_path / "out")["images"]] == ["good.png"]


def test_names_do_not_collide_and_inputs_stay(trained, tmp_path):
    _, weights = trained
    sources = [save(tmp_path / "x" / "a.png", 0), save(tmp_path / "y" / "a.png", 1), save(tmp_path / "y" / "a.jpg", 2)]
    before = [path.read_bytes() for path in sources]
    predict_files(weights, [*sources, tmp_path / "x"], tmp_path / "x" / "out")
    drawn = [image["drawn"] for image in read(tmp_path / "x" / "out")["images"]]
    assert drawn == ["pictures/a.jpg", "pictures/a-2.jpg", "pictures/a-3.jpg"], "each file once"
    assert [path.read_bytes() for path in sources] == before
    again = find_pictures([tmp_path / "x"], leave_out=tmp_path / "x" / "out")
    assert [name for _, name in again] == ["a.png"], "what was drawn is not read again"


def test_a_folder_with_other_things_is_not_written_to(trained, tmp_path):
    _, weights = trained
    source = save(tmp_path / "in" / "a.png")
    with pytest.raises(DataError, match="holds no predictions"):
        predict_files(weights, [source], tmp_path / "in")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no pictures found"):
        predict_files(weights, [tmp_path / "empty"], tmp_path / "out")
    for _ in range(2):
        assert predict_files(weights, [source], tmp_path / "out") == 0, "earlier predictions may be replaced"


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--batch", "0"], "--batch: expected at least 1, got 0"), (["--device", "abacus"], "--device: ")],
)
def test_wrong_values_name_the_flag(words, message, trained, tmp_path, capsys):
    _, weights = trained
    source = save(tmp_path / "a.png")
    assert main(["predict", str(weights), str(source), "--out", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
