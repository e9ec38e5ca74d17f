"""Prediction in Python and from the command line."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from faster_coco_eval import COCO
from faster_coco_eval.core import mask as rle_codec
from PIL import Image

from bucketrank.cli import main
from bucketrank.data.shapes import Shapes
from bucketrank.detectors.atss import ATSS
from bucketrank.errors import DataError
from bucketrank.inference import predict
from bucketrank.inference.prediction import Predictions, as_tensor, drawn_names, find_images, predict_files
from bucketrank.weights.files import Meta
from bucketrank.weights.load import load_model

from .untrained_weights import CATEGORIES, CLASSES, write_weights


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a model and its weights file, whose threshold keeps ten detections of the first image."""
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    model, _ = write_weights(path)
    return write_weights(path, threshold=float(predict(model, [drawn_image()])[0]["scores"][9]))


def drawn_image(number=0, size=(100, 80)):
    return Image.fromarray(Shapes(size=100).draw(number).pixels).resize(size)


def save(path: Path, number=0, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn_image(number).save(path, **options)
    return path


def read(out: Path):
    return json.loads((out / "predictions.json").read_text())


def test_all_input_types_give_the_same_detections(trained, tmp_path):
    model, _ = trained
    image = drawn_image()
    array = np.asarray(image)
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    images = [save(tmp_path / "a.png"), str(tmp_path / "a.png"), image, array, tensor, tensor / 255]
    images.append(tensor.double() / 255)
    results = predict(model, images)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])
    assert not results[0]["boxes"].requires_grad


def test_a_16_bit_image_is_read_as_its_file_is(tmp_path):
    values = np.linspace(0, 65535, 64 * 48).reshape(48, 64).astype(np.uint16)
    Image.fromarray(values).save(tmp_path / "deep.png")
    from_file, opened = as_tensor(tmp_path / "deep.png"), as_tensor(Image.open(tmp_path / "deep.png"))
    assert torch.equal(from_file, opened)
    assert 0.45 < opened.mean() < 0.55
    with pytest.raises(ValueError, match="floating-point numbers of unknown range"):
        as_tensor(Image.fromarray(values.astype(np.float32)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floats_of_every_precision_become_float32(dtype):
    values = torch.linspace(0, 1, 60).reshape(3, 4, 5).to(dtype)
    torch.testing.assert_close(as_tensor(values), values.to(torch.float32), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.bool])
def test_integers_other_than_uint8_have_no_known_range(dtype):
    with pytest.raises(ValueError, match=rf"expected a tensor \(3, H, W\) of uint8 or of floats .* got {dtype};"):
        as_tensor(torch.ones(3, 4, 5, dtype=dtype))


def test_a_score_equal_to_the_threshold_is_kept(trained):
    model, _ = trained
    images = [drawn_image(number) for number in range(3)]
    unfiltered = predict(model, images, batch_size=2)
    for alone, together in zip(predict(model, images), unfiltered, strict=True):
        torch.testing.assert_close(together["scores"], alone["scores"])
    # The batch size changes the rounding, so the scores at the threshold come from batches of the same size.
    tenth = float(unfiltered[0]["scores"][9])
    filtered = predict(model, images, threshold=tenth, batch_size=2)
    assert len(filtered[0]["scores"]) == 10
    for before, after in zip(unfiltered, filtered, strict=True):
        torch.testing.assert_close(after["scores"], before["scores"][before["scores"] >= tenth], rtol=0, atol=0)


def test_the_batch_size_does_not_matter(trained):
    model, _ = trained
    images = [drawn_image(number) for number in range(3)]
    one_by_one = predict(model, iter(images), batch_size=1)
    for size in (2, 3):
        in_batches = predict(model, iter(images), batch_size=size)
        for expected, given in zip(one_by_one, in_batches, strict=True):
            torch.testing.assert_close(given["scores"], expected["scores"])


def test_the_stored_threshold_is_the_default(trained):
    built, weights = trained
    loaded, meta = load_model(weights)
    (detections,) = predict(loaded, [drawn_image()])
    assert len(detections["scores"]) == 10
    assert float(detections["scores"].min()) >= meta.threshold > 0
    assert len(predict(loaded, [drawn_image()], threshold=0)[0]["scores"]) == 100, "an argument of 0 is not None"
    assert len(predict(built, [drawn_image()])[0]["scores"]) == 100, "not loaded from a file"
    assert len(predict(torch.nn.Sequential(loaded), [drawn_image()])[0]["scores"]) == 100, (
        "no attribute stored_threshold"
    )


def test_the_area_of_a_mask_is_that_of_its_pixels():
    meta = Meta(classes=["cell"], category_ids=[7], threshold=0.5, recipe={})
    masks = torch.zeros(1, 1, 20, 20)
    masks[0, 0, :2, :2] = 1
    detections = {"boxes": torch.tensor([[0.0, 0, 10, 10]]), "labels": torch.tensor([1]), "scores": torch.tensor([0.9])}
    for given, area in ((detections, 100.0), (detections | {"masks": masks}, 4.0)):
        predictions = Predictions(meta, 0.5)
        predictions.add("image.png", "image.png", (20, 20), given)
        assert [annotation["area"] for annotation in predictions.annotations] == [area]


def test_wrong_arguments(trained):
    model, _ = trained
    with pytest.raises(ValueError, match="expected a batch_size of at least 1, got 0"):
        predict(model, [drawn_image()], batch_size=0)
    with pytest.raises(ValueError, match=r"device: expected auto, cpu, .* got 'abacus'"):
        predict(model, [drawn_image()], device="abacus")
    with pytest.raises(ValueError, match="expected a threshold from 0 to 1, got 50"):
        predict(model, [drawn_image()], threshold=50)


@pytest.mark.parametrize("wrong", [None, 5, b"abc", {"image": 1}, [None]])
def test_an_image_of_another_type_is_named(wrong, trained):
    got = "NoneType" if wrong == [None] else type(wrong).__name__
    with pytest.raises(TypeError, match=f"expected a file name, PIL image, array or tensor, got {got}"):
        predict(trained[0], wrong)


def test_values_up_to_255_are_not_taken_for_a_white_image(trained):
    for values in (torch.full((3, 4, 5), 255.0), torch.full((3, 4, 5), math.nan)):
        with pytest.raises(ValueError, match=r"expected floats from 0 to 1, got (255|nan); divide values up to 255"):
            predict(trained[0], values)
    as_tensor(torch.full((3, 4, 5), 1.1))  # resized with an overshoot
    as_tensor(torch.full((3, 4, 5), -0.1))
    with pytest.raises(ValueError, match=r"expected floats from 0 to 1, got -1; do not normalise the image"):
        predict(trained[0], torch.linspace(-1, 1, 60).reshape(3, 4, 5))
    with pytest.raises(ValueError, match=r"expected an image with pixels, got shape \(3, 0, 10\)"):
        predict(trained[0], np.zeros((0, 10, 3), dtype=np.uint8))


def test_a_path_that_is_no_image_gets_its_own_remedy(trained, tmp_path):
    with pytest.raises(DataError, match="expected an image file, got no such file; correct the path"):
        predict(trained[0], tmp_path / "nowhere.jpg")
    with pytest.raises(DataError, match="expected an image file, got a folder; list its files"):
        predict(trained[0], tmp_path)


def test_the_training_mode_is_restored(trained):
    model, _ = trained
    model.train()
    try:
        predict(model, [drawn_image()])
        assert model.training
        with pytest.raises(ValueError, match="expected an array"):
            predict(model, [np.zeros((4, 4), dtype=np.uint8)])
        assert model.training, "also after an error"
    finally:
        model.eval()


def test_the_exif_orientation_is_applied(trained, tmp_path):
    model, _ = trained
    exif = Image.Exif()
    exif[0x0112] = 6  # stored rotated by 90 degrees
    save(tmp_path / "turned.png", exif=exif)
    upright = drawn_image().transpose(Image.Transpose.ROTATE_270)
    torch.testing.assert_close(predict(model, [tmp_path / "turned.png"]), predict(model, [upright]))


def test_the_command_writes_images_and_json(trained, tmp_path, capsys):
    model, weights = trained
    threshold = load_model(weights)[1].threshold
    save(tmp_path / "in" / "a.png", 0)
    save(tmp_path / "in" / "deep" / "er" / "b.JPG", 1)
    (tmp_path / "in" / "notes.txt").write_text("not an image")
    out = tmp_path / "out"
    assert main(["predict", str(weights), str(tmp_path / "in"), "--out", str(out)]) == 0
    document = read(out)
    assert [image["file_name"] for image in document["images"]] == ["a.png", "deep/er/b.JPG"]
    assert [image["drawn"] for image in document["images"]] == ["pictures/a.jpg", "pictures/deep/er/b.jpg"]
    assert document["categories"] == [{"id": i, "name": n} for i, n in zip(CATEGORIES, CLASSES, strict=True)]
    assert document["info"]["threshold"] == threshold, "the one stored with the weights"
    for image in document["images"]:
        with Image.open(out / image["drawn"]) as drawn:
            assert drawn.size == (640, 512), "enlarged"
        assert (image["width"], image["height"]) == (100, 80)

    (expected,) = predict(model, [tmp_path / "in" / "a.png"], threshold=threshold)
    annotations = [each for each in document["annotations"] if each["image_id"] == 1]
    assert len(annotations) == len(expected["scores"]) == 10
    x1, y1, x2, y2 = expected["boxes"][0].tolist()
    assert annotations[0]["bbox"] == pytest.approx([x1, y1, x2 - x1, y2 - y1], abs=1e-3)
    assert annotations[0]["category_id"] == CATEGORIES[int(expected["labels"][0]) - 1]
    assert annotations[0]["score"] == pytest.approx(float(expected["scores"][0]))
    assert (
        f"{len(document['annotations'])} detections with a score of at least {threshold:.3g} (chosen"
        in capsys.readouterr().out
    )


def test_cocos_tools_read_the_json(trained, tmp_path):
    _, weights = trained
    predict_files(weights, [save(tmp_path / "a.png")], tmp_path / "out", threshold=0)
    document = read(tmp_path / "out")
    coco = COCO(document)
    assert len(coco.anns) == len(document["annotations"]) == 100
    assert len(coco.loadRes(document["annotations"]).anns) == 100


def test_masks_are_written_as_rle(tmp_path):
    model, weights = write_weights(tmp_path / "w.safetensors", name="mask_rcnn")
    predict_files(weights, [save(tmp_path / "a.png")], tmp_path / "out", threshold=0)
    (expected,) = predict(model, [tmp_path / "a.png"])
    rle = read(tmp_path / "out")["annotations"][0]["segmentation"]
    assert rle["size"] == [80, 100]
    np.testing.assert_array_equal(rle_codec.decode(rle), expected["masks"][0, 0].numpy() > 0.5)


def test_unreadable_files_are_reported_and_skipped(trained, tmp_path, capsys):
    _, weights = trained
    save(tmp_path / "in" / "good.png")
    (tmp_path / "in" / "broken.png").write_bytes(b"not an image")
    assert main(["predict", str(weights), str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out
    assert "broken.png" in printed
    assert "skipped 1 file, listed above" in printed
    assert [image["file_name"] for image in read(tmp_path / "out")["images"]] == ["good.png"]


def test_a_path_that_does_not_exist_is_named_before_anything_is_written(trained, tmp_path, capsys):
    _, weights = trained
    sources = [str(save(tmp_path / "good.png")), str(tmp_path / "nowhere")]
    assert main(["predict", str(weights), *sources, "--out", str(tmp_path / "out")]) == 1
    expected = f"{tmp_path / 'nowhere'}: expected an image or a folder of images, got no such file or folder; correct"
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_names_do_not_collide_and_inputs_are_unchanged(trained, tmp_path):
    _, weights = trained
    sources = [save(tmp_path / "x" / "a.png", 0), save(tmp_path / "y" / "a.png", 1), save(tmp_path / "y" / "a.jpg", 2)]
    before = [path.read_bytes() for path in sources]
    predict_files(weights, [*sources, tmp_path / "x"], tmp_path / "x" / "out")
    drawn = [image["drawn"] for image in read(tmp_path / "x" / "out")["images"]]
    assert drawn == ["pictures/x/a.jpg", "pictures/y/a.jpg", "pictures/y/a-2.jpg"], "each file once"
    assert [path.read_bytes() for path in sources] == before
    again = find_images([tmp_path / "x"], skip=tmp_path / "x" / "out")
    assert [name for _, name in again] == ["a.png"], "drawn images are not read again"


def test_a_folder_with_other_files_is_not_written_to(trained, tmp_path):
    _, weights = trained
    source = save(tmp_path / "in" / "a.png")
    with pytest.raises(DataError, match="holds no predictions"):
        predict_files(weights, [source], tmp_path / "in")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="expected images, found no file that ends in"):
        predict_files(weights, [tmp_path / "empty"], tmp_path / "out")
    for _ in range(2):
        assert predict_files(weights, [source], tmp_path / "out") == 0, "earlier predictions may be replaced"


@pytest.mark.parametrize("text", ['{"images": [], "annotations": []}', '{"info": "mine"}', "[1, 2]", "\udc80", ""])
def test_a_foreign_document_is_not_overwritten(text, trained, tmp_path, capsys):
    _, weights = trained
    out = tmp_path / "out"
    out.mkdir()
    (out / "predictions.json").write_text(text, errors="surrogateescape")
    before = (out / "predictions.json").read_bytes()
    assert main(["predict", str(weights), str(save(tmp_path / "a.png")), "--out", str(out)]) == 1
    assert "predictions.json: was not written by bucketrank predict; choose a new folder" in capsys.readouterr().err
    assert (out / "predictions.json").read_bytes() == before
    assert [path.name for path in out.iterdir()] == ["predictions.json"]


def test_foreign_drawings_are_not_overwritten(trained, tmp_path):
    _, weights = trained
    source, out = save(tmp_path / "a.png"), tmp_path / "out"
    other = save(tmp_path / "b.png")
    predict_files(weights, [other], out)
    foreign = save(out / "pictures" / "a.jpg", 3)
    before = foreign.read_bytes()
    with pytest.raises(DataError, match=r"pictures/a\.jpg: was not written by bucketrank predict"):
        predict_files(weights, [source], out)
    assert foreign.read_bytes() == before
    foreign.unlink()
    foreign.symlink_to(tmp_path / "elsewhere.jpg")
    with pytest.raises(DataError, match=r"pictures/a\.jpg: was not written by bucketrank predict"):
        predict_files(weights, [source], out)
    assert not (tmp_path / "elsewhere.jpg").exists(), "a link is not followed"
    foreign.unlink()
    for sources in ([source], [other], [source]):
        assert predict_files(weights, sources, out) == 0, "drawings of earlier calls may be replaced"


def test_an_interrupted_call_does_not_block_the_next(trained, tmp_path):
    _, weights = trained
    source, out = save(tmp_path / "a.png"), tmp_path / "out"
    predict_files(weights, [source], out)
    (out / "predictions.json").unlink()  # it is written last
    assert predict_files(weights, [source], out) == 0
    (out / "predictions.json").unlink()
    save(out / "pictures" / "mine.jpg")
    with pytest.raises(DataError, match="holds no predictions"):
        predict_files(weights, [source], out)


def test_files_of_one_name_in_several_folders_are_distinguished(trained, tmp_path, monkeypatch):
    _, weights = trained
    a, b = save(tmp_path / "in/a/x.jpg", 0), save(tmp_path / "in/b/x.jpg", 1)
    monkeypatch.chdir(tmp_path)
    calls = {
        "files": [a, b],
        "folders": [Path("in/a"), tmp_path / "in/b"],
        "above": [tmp_path / "in"],
        "dots": [Path("in/a/../b/.."), Path("in/b/x.jpg")],
    }
    for name, sources in calls.items():
        predict_files(weights, sources, tmp_path / name, threshold=1.0)
        images = read(tmp_path / name)["images"]
        assert [image["file_name"] for image in images] == ["a/x.jpg", "b/x.jpg"], name
        assert [image["drawn"] for image in images] == ["pictures/a/x.jpg", "pictures/b/x.jpg"], name
    predict_files(weights, [a], tmp_path / "one", threshold=1.0)
    assert read(tmp_path / "one")["images"][0]["file_name"] == "x.jpg"


def test_drawn_files_and_folders_have_different_names():
    assert drawn_names(["a.png", "a.jpg/b.png", "A.jpg"]) == [
        "pictures/a-2.jpg",
        "pictures/a.jpg/b.jpg",
        "pictures/A-3.jpg",
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [(3000, 2), (1, 3000), (70_000, 3)])
def test_thin_images_are_predicted(size, trained, tmp_path):
    _, weights = trained
    save(tmp_path / "in" / "a.png")
    drawn_image(size=size).save(tmp_path / "in" / "thin.png")
    assert predict_files(weights, [tmp_path / "in"], tmp_path / "out", threshold=0, batch_size=2) == 0
    (_, thin) = read(tmp_path / "out")["images"]
    assert (thin["file_name"], thin["width"], thin["height"]) == ("thin.png", *size)
    assert (tmp_path / "out" / thin["drawn"]).is_file()


def test_an_image_on_which_the_detector_fails_does_not_cost_the_others(trained, tmp_path, capsys, monkeypatch):
    _, weights = trained
    for number, name in enumerate(("a.png", "b.png", "c.png")):
        save(tmp_path / "in" / name, number)
    drawn_image(size=(50, 40)).save(tmp_path / "in" / "b.png")
    forward = ATSS.forward

    def fail(self, images, targets=None):
        if any(image.shape[-1] == 50 for image in images):
            raise RuntimeError("out of memory\nhint")
        return forward(self, images, targets)

    monkeypatch.setattr(ATSS, "forward", fail)
    assert main(["predict", str(weights), str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--batch", "3"]) == 1
    printed = capsys.readouterr().out
    assert "b.png: the detector failed on this image of 50 x 40 pixels (out of memory)" in printed
    assert "skipped 1 file, listed above" in printed
    assert [image["file_name"] for image in read(tmp_path / "out")["images"]] == ["a.png", "c.png"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "0"], "--batch: expected at least 1, got 0"),
        (["--threshold", "1e400"], "--threshold: expected a score from 0 to 1, got inf"),
        (["--threshold", "nan"], "--threshold: expected a score from 0 to 1, got nan"),
        (["--threshold", "50"], "--threshold: expected a score from 0 to 1, got 50"),
        (["--device", "abacus"], "predict: --device: expected auto, cpu, "),
    ],
)
def test_wrong_values_name_the_flag(words, message, trained, tmp_path, capsys):
    _, weights = trained
    source = save(tmp_path / "a.png")
    assert main(["predict", str(weights), str(source), "--out", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_threshold_is_a_score(trained, tmp_path):
    """JSON has no infinity."""
    with pytest.raises(DataError, match="threshold: expected a score from 0 to 1, got inf"):
        predict_files(trained[1], [save(tmp_path / "a.png")], tmp_path / "out", threshold=math.inf)
    with pytest.raises(ValueError, match="predict_files: expected a batch_size of at least 1, got 0"):
        predict_files(trained[1], [save(tmp_path / "a.png")], tmp_path / "out", batch_size=0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("finished", [False, True])
def test_what_a_crash_left_does_not_block_the_next_call(finished, trained, tmp_path):
    _, weights = trained
    source, out = save(tmp_path / "a.png"), tmp_path / "out"
    if finished:
        predict_files(weights, [source], out)
    (out / "pictures").mkdir(parents=True, exist_ok=True)
    (out / "pictures" / ".a.jpg.123").write_bytes(b"half")
    (out / ".predictions.json.123").write_bytes(b"{")
    assert predict_files(weights, [source], out) == 0
    with Image.open(out / "pictures" / "a.jpg") as drawn:
        drawn.load()


def test_the_longest_file_names(trained, tmp_path):
    _, weights = trained
    names = ["a" * 251 + ".png", "a" * 251 + ".jpg", "é" * 125 + ".png", "é" * 125 + ".jpg", "b" * 255]
    for number, name in enumerate(names):
        save(tmp_path / "in" / name, number, format="PNG")
    sources = [tmp_path / "in", tmp_path / "in" / names[-1]]
    assert predict_files(weights, sources, tmp_path / "out") == 0
    drawn = [image["drawn"] for image in read(tmp_path / "out")["images"]]
    assert len({*drawn}) == len(names)
    assert all((tmp_path / "out" / name).is_file() for name in drawn)
    assert len(list((tmp_path / "out" / "pictures").iterdir())) == len(names)


def test_a_full_disk_names_the_drawing_and_leaves_no_half_file(trained, tmp_path, monkeypatch, capsys):
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    words = ["predict", str(trained[1]), str(save(tmp_path / "a.png")), "--out", str(tmp_path / "out")]
    assert main(words) == 1
    error = capsys.readouterr().err
    assert f"{tmp_path / 'out' / 'pictures' / 'a.jpg'}: cannot be written, the disk or the quota is full" in error
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


@pytest.mark.skipif(sys.platform != "linux", reason="file names of other systems have no control characters")
def test_control_characters_of_file_names_are_escaped(trained, tmp_path, capsys):
    _, weights = trained
    (tmp_path / "in").mkdir()
    name = os.fsdecode(b"broken\x1b[2J\x07\xff.png")
    (tmp_path / "in" / name).write_bytes(b"not an image")
    save(tmp_path / "in" / "good.png")
    assert main(["predict", str(weights), str(tmp_path / "in"), "--out", str(tmp_path / "out\x1b]0;x")]) == 1
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert r"broken\x1b[2J\x07\udcff.png" in printed
    assert main(["predict", str(weights), str(tmp_path / "no\x1b[2J")]) == 1
    assert r"no\x1b[2J: expected an image" in capsys.readouterr().err


def test_drawings_of_earlier_predictions_are_removed(trained, tmp_path):
    _, weights = trained
    for number in range(3):
        save(tmp_path / "in" / f"{number}.png", number)
    predict_files(str(weights), [str(tmp_path / "in")], str(tmp_path / "out"))
    (tmp_path / "out" / "pictures" / "2.jpg").write_text("edited")
    predict_files(weights, [tmp_path / "in" / "1.png"], tmp_path / "out")
    assert [image["file_name"] for image in read(tmp_path / "out")["images"]] == ["1.png"]
    left = sorted(path.name for path in (tmp_path / "out" / "pictures").iterdir())
    assert left == ["1.jpg", "2.jpg"], "a file that is not ours any more stays"


@pytest.mark.slow
def test_several_predictions_into_one_folder(trained, tmp_path):
    _, weights = trained
    for number in range(4):
        save(tmp_path / "in" / f"{number}.png", number)
    words = ["predict", str(weights), str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    code = f"import sys; from bucketrank.cli import main; sys.exit(main({words!r}))"
    calls = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [call.wait() for call in calls] == [0, 0]
    drawn = [image["drawn"] for image in read(tmp_path / "out")["images"]]
    assert drawn == [f"pictures/{number}.jpg" for number in range(4)]
    for name in drawn:
        with Image.open(tmp_path / "out" / name) as image:
            image.load()
    assert len(list((tmp_path / "out").rglob("*"))) == 6, "no temporary files"


@pytest.mark.slow
def test_prediction_does_not_import_lightning(tmp_path):
    write_weights(tmp_path / "weights.safetensors")
    Image.new("RGB", (64, 48), (90, 120, 30)).save(tmp_path / "photo.png")
    code = f"""
import sys
from bucketrank.cli import main
words = ["predict", {str(tmp_path / "weights.safetensors")!r}, {str(tmp_path / "photo.png")!r}]
status = main([*words, "--out", {str(tmp_path / "out")!r}])
print(status, [name for name in ("lightning", "torchmetrics") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 []"
