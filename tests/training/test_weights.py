"""Damaged and hostile weights files: commands that read them end with a message, and no code in them is run."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import struct
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from bucketrank.cli import main
from bucketrank.errors import WeightsError
from bucketrank.weights.files import read_weights
from tests.data.small_folders import write_image
from tests.inference.untrained_weights import CATEGORIES, CLASSES, write_weights

COMMANDS = ["predict", "eval", "export"]
few = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    return write_weights(folder / "weights.safetensors")[1]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_image(folder / "images/a.png", width=96, height=96)
    document = {
        "images": [{"id": 1, "file_name": "a.png", "width": 96, "height": 96}],
        "categories": [{"id": number, "name": name} for number, name in zip(CATEGORIES, CLASSES, strict=True)],
        "annotations": [{"id": 1, "image_id": 1, "category_id": CATEGORIES[0], "bbox": [9, 9, 40, 40]}],
    }
    (folder / "val.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def contents(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118


def ran(command: str, weights: Path, data: Path, out: Path) -> tuple[int, str]:
    """The exit status, and all that is printed."""
    words: dict[str, list[Path | str]] = {
        "predict": [data / "images/a.png", "--out", out / "predictions"],
        "eval": [data],
        "export": ["--out", out / "model.onnx"],
    }
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict", write_through=True)
    with redirect_stdout(printed), redirect_stderr(printed):
        status = main([command, str(weights), *map(str, words[command])])
    text = printed.buffer.getvalue().decode()
    assert text.strip()
    assert "Traceback" not in text
    return status, text


@pytest.mark.parametrize("command", ["predict", "eval"])
def test_a_sound_file_is_read(command: str, weights: Path, data: Path, tmp_path: Path) -> None:
    status, text = ran(command, weights, data, tmp_path)
    assert status == 0, text


class Hostile:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pickle_is_not_unpickled(command: str, data: Path, tmp_path: Path) -> None:
    plain, zipped = tmp_path / "plain.safetensors", tmp_path / "zipped.safetensors"
    plain.write_bytes(pickle.dumps(Hostile(tmp_path / "run")))
    torch.save(Hostile(tmp_path / "run"), zipped)
    for file in (plain, zipped):
        status, text = ran(command, file, data, tmp_path)
        assert status == 1
        assert "pickles are never loaded" in text
    assert not (tmp_path / "run").exists()
    pickle.loads(plain.read_bytes())
    assert (tmp_path / "run").exists(), "it would have been seen"


@few
@given(
    content=st.binary(max_size=64)
    | st.integers(0, 2**64 - 1).map(lambda size: struct.pack("<Q", size) + b"{}")
    | st.sampled_from([b"{" * n for n in (1, 8, 5000)])
    | st.sampled_from(
        ['{"__metadata__": 5}', '{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}', "[]"]
    ).map(lambda header: struct.pack("<Q", len(header)) + header.encode()),
    command=st.sampled_from(COMMANDS),
)
def test_bytes_that_are_no_weights(content: bytes, command: str, data: Path) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "w.safetensors"
        file.write_bytes(content)
        assert ran(command, file, data, Path(folder))[0] == 1


@few
@given(at=st.integers(0, 2**30), bit=st.integers(0, 7), cut=st.booleans(), command=st.sampled_from(["predict", "eval"]))
def test_damaged_weights(at: int, bit: int, cut: bool, command: str, weights: Path, data: Path) -> None:
    content = bytearray(weights.read_bytes())
    header = 8 + struct.unpack("<Q", content[:8])[0]
    at %= len(content) if cut else header  # in a tensor, one wrong bit is another weight
    content[at] ^= 1 << bit
    with TemporaryDirectory() as folder:
        file = Path(folder) / "w.safetensors"
        file.write_bytes(content[:at] if cut else content)
        status, text = ran(command, file, data, Path(folder))
        assert status == 1 or not cut, text


VALUES = [
    "",
    "null",
    "5",
    "-1",
    "NaN",
    "[]",
    "{}",
    "[1]",
    '[["a"], {}]',
    '"text"',
    "[" * 5000,
    "{",
    "9" * 5000,
    "1e999",
]
VALUES += ['["\\ud800", "b", "c"]', "[Infinity, 1, 2]", '{"detector": 5}', '{"detector": {"name": []}}', "[3, 3, 3]"]
VALUES += [json.dumps(["a" * 10**5, "b\n[/red]\0", "c"]), json.dumps([2**70, 1, 2]), json.dumps([True, False, None])]
KEYS = ["bucketrank", "classes", "category_ids", "threshold", "recipe", "metrics", "versions", "images"]


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_hostile_descriptions(key: str, weights: Path, data: Path, tmp_path: Path) -> None:
    state, metadata = contents(weights)
    file = tmp_path / "w.safetensors"
    for value in VALUES:
        save_file(state, file, metadata | {key: value})
        status, text = ran("predict", file, data, tmp_path)
        assert status in (0, 1), text
        if status == 0:
            status, text = ran("eval", file, data, tmp_path)
            assert status in (0, 1), text


HUGE = [10**6, 10**9, 2**63, 10**30]
settings_of_anything = st.sampled_from(
    [None, True, -1, 0, 1, 2.5, "", "x", "hf-hub:a/b", "../x", [], [1], {}, {"a": 1}]
)


@pytest.mark.slow
@few
@given(drawn=st.data())
def test_hostile_recipes(drawn: st.DataObject, weights: Path, data: Path) -> None:
    state, metadata = contents(weights)
    recipe = json.loads(metadata["recipe"])
    places = [(group, key) for group, values in recipe.items() if isinstance(values, dict) for key in values]
    group, key = drawn.draw(st.sampled_from(places))
    recipe[group][key] = drawn.draw(settings_of_anything | st.sampled_from(HUGE))
    with TemporaryDirectory() as folder:
        file = Path(folder) / "w.safetensors"
        save_file(state, file, metadata | {"recipe": json.dumps(recipe)})
        status, text = ran(drawn.draw(st.sampled_from(["predict", "eval"])), file, data, Path(folder))
        assert status in (0, 1), text


@pytest.mark.parametrize("value", [9600, *HUGE[1:]])  # 9600 channels would be built: a layer of 3 GB
def test_a_recipe_asks_for_no_more_memory_than_the_file_holds(value: int, weights: Path, data: Path, tmp_path: Path):
    state, metadata = contents(weights)
    recipe = json.loads(metadata["recipe"])
    recipe["detector"]["channels"] = value
    file = tmp_path / "w.safetensors"
    save_file(state, file, metadata | {"recipe": json.dumps(recipe)})
    status, text = ran("predict", file, data, tmp_path)
    assert status == 1
    assert str(file) in text
    expected = "it has many more parameters than the file" if value == 9600 else "expected a number from 1 to 1,000,000"
    assert expected in text, "not the system's refusal, which comes later or never"


@pytest.mark.parametrize("change", ["nan", "missing", "more", "shape", "integers", "complex", "half"])
@pytest.mark.parametrize("command", ["predict", "eval"])
def test_tensors_that_do_not_fit(command: str, change: str, weights: Path, data: Path, tmp_path: Path) -> None:
    state, metadata = contents(weights)
    name = next(name for name, tensor in state.items() if tensor.ndim == 4)
    if change == "missing":
        del state[name]
    elif change == "more":
        state["another"] = torch.zeros(3)
    else:
        tensor = state[name].clone()
        state[name] = {
            "nan": torch.full_like(tensor, math.nan),
            "shape": tensor[:1].clone(),
            "integers": tensor.long(),
            "complex": tensor.to(torch.complex64),
            "half": tensor.half(),
        }[change]
    file = tmp_path / "w.safetensors"
    save_file(state, file, metadata)
    status, text = ran(command, file, data, tmp_path)
    assert status == (0 if change == "half" else 1), text
    if status:
        assert str(file) in text
    if change in ("integers", "complex"):
        assert f"{name}: expected torch.float32, got torch." in text


@pytest.mark.parametrize("value", ["nan", "inf", "-0.1", "1.5"])
def test_a_threshold_that_is_no_score(value: str, weights: Path, data: Path, tmp_path: Path) -> None:
    state, metadata = contents(weights)
    save_file(state, tmp_path / "w.safetensors", metadata | {"threshold": value})
    status, text = ran("predict", tmp_path / "w.safetensors", data, tmp_path)
    assert status == 1
    assert "expected threshold to be a score from 0 to 1" in text


@pytest.mark.parametrize("side", [13_378, 30000, 10**9])
def test_an_input_size_that_no_memory_holds(side: int, weights: Path, data: Path, tmp_path: Path) -> None:
    state, metadata = contents(weights)
    recipe = json.loads(metadata["recipe"])
    recipe["inputs"] |= {"min_size": side, "max_size": side}
    save_file(state, tmp_path / "w.safetensors", metadata | {"recipe": json.dumps(recipe)})
    status, text = ran("predict", tmp_path / "w.safetensors", data, tmp_path)
    assert status == 1
    assert f"inputs.max_size: expected resized images of at most 178,956,970 pixels, got {side} (min_size)" in text


def test_the_python_function_says_it_too(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"no weights")
    with pytest.raises(WeightsError, match="not a safetensors file"):
        read_weights(tmp_path / "w.safetensors")
