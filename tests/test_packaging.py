"""Promises of the package: its metadata, its dependencies, and what an import loads."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import bucketrank
import bucketrank.losses
from bucketrank.lazy import import_on_use

ROOT = Path(__file__).parents[1]

# Imports what the first argument says and prints the packages this loaded beyond torch and the standard library.
PROBE = """
import json, sys, torch
before = set(sys.modules)
exec(sys.argv[1])
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
heavy = {"torch._dynamo", "torch._inductor"} & (set(sys.modules) - before)
print(json.dumps(sorted(loaded - set(sys.stdlib_module_names) - {"torch", "bucketrank"} | heavy)))
"""

IMPORT_EVERYTHING = "from bucketrank import " + ", ".join(bucketrank.__all__)


def run(program: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "error", "-c", program, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def loaded_by(statement: str) -> list[str]:
    loaded: list[str] = json.loads(run(PROBE, statement))
    return loaded


def test_version_is_that_of_the_metadata():
    assert bucketrank.__version__ == importlib.metadata.version("bucketrank")
    assert f'\nversion = "{bucketrank.__version__}"\n' in (ROOT / "pyproject.toml").read_text()


def test_works_from_a_checkout_that_is_not_installed():
    # Isolated, without site-packages: no metadata of the package is on the path.
    program = f"""
import sys
sys.path.insert(0, {str(ROOT / "src")!r})
import bucketrank
print(bucketrank.__version__)
"""
    command = [sys.executable, "-I", "-S", "-W", "error", "-c", program]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "0+unknown\n"


def test_types_are_shipped():
    assert (Path(bucketrank.__file__).parent / "py.typed").is_file()


def test_every_public_name_is_there():
    missing = [name for name in bucketrank.__all__ if not hasattr(bucketrank, name)]
    assert missing == []
    with pytest.raises(AttributeError, match="no_such_loss"):
        _ = bucketrank.no_such_loss


def test_star_import_and_dir_give_the_public_names():
    program = """
import bucketrank
before = {*globals()}
from bucketrank import *
assert {*globals()} - before - {"before"} == {*bucketrank.__all__}, {*globals()} - before
assert {*bucketrank.__all__} <= {*dir(bucketrank)}
"""
    run(program)
    assert run("import sys, bucketrank; dir(bucketrank); print('torch' in sys.modules)") == "False\n"


def test_the_losses_package_exports_the_same_names():
    public = {name: value for name, value in vars(bucketrank.losses).items() if not name.startswith("_")}
    exported = {name for name, value in public.items() if not isinstance(value, ModuleType)}
    assert exported == {*bucketrank.__all__}


def test_import_loads_torch_and_nothing_else():
    assert loaded_by(IMPORT_EVERYTHING) == []


@pytest.mark.slow
@pytest.mark.parametrize("planted", ["yaml", "torch._dynamo"])
def test_that_test_bites(planted):
    assert planted in loaded_by(f"{IMPORT_EVERYTHING}; import {planted}")


def test_the_bare_package_does_not_even_load_torch():
    assert run("import sys, bucketrank; print('torch' in sys.modules)") == "False\n"


def test_losses_work_without_any_extra():
    program = """
import sys
sys.modules.update(dict.fromkeys(["numba", "llvmlite", "rich", "matplotlib", "yaml", "torchvision"]))
import torch, bucketrank
logits = torch.tensor([3.0, 2.0, 1.0], requires_grad=True)
loss = bucketrank.ap_loss(logits, torch.tensor([1.0, 0.0, 1.0]), delta=0)
loss.backward()
print([round(x, 4) for x in [loss.item(), *logits.grad.tolist()]])
"""
    # The second positive has one negative among three above it: (0/1 + 1/3) / 2, and the same pushes both apart.
    assert run(program) == "[0.1667, 0.0, 0.1667, -0.1667]\n"


EXTRAS = {
    "bucketrank": ("calibrate", "calibrate_scores", "load", "train", "detect"),
    "bucketrank.data": ("CocoDataset", "check", "detect"),
    "bucketrank.data.convert": ("convert_voc", "convert_yolo", "detect"),
    "bucketrank.inference": ("evaluate", "export_onnx", "predict", "detect"),
    "bucketrank.detectors": ("Detector", "build", "detect"),
    "bucketrank.evaluation": ("Evaluator", "coco_records", "detect"),
    "bucketrank.weights": ("load_model", "read_weights", "detect"),
    "bucketrank.report": ("write_report", "detect"),
    "bucketrank.training": ("load_model", "train", "detect"),
    "bucketrank.integrations.torchvision": ("undo", "use_ranking_loss", "torchvision"),
    "bucketrank.integrations.transformers": ("undo", "use_ranking_loss", "transformers"),
}


@pytest.mark.slow
def test_a_missing_library_names_the_extra():
    program = """
import importlib, json, sys
missing = ["PIL", "faster_coco_eval", "lightning", "numba", "numpy", "onnx", "rich", "safetensors", "scipy", "timm"]
sys.modules.update(dict.fromkeys([*missing, "torchvision", "transformers", "yaml"]))
messages = {}
for package, names in json.loads(sys.argv[1]).items():
    for name in names[:-1]:
        try:
            getattr(importlib.import_module(package), name)
        except ImportError as error:
            messages[f"{package}.{name}"] = str(error)
print(json.dumps(messages))
"""
    # torch warns that numpy is missing
    command = [sys.executable, "-W", "ignore", "-c", program, json.dumps(EXTRAS)]
    messages = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    for package, (*names, extra) in EXTRAS.items():
        for name in names:
            message = messages[f"{package}.{name}"]
            assert f'pip install "bucketrank[{extra}]"' in message, (name, message)
            assert package in message, (name, message)


def test_a_bug_in_an_import_is_not_reported_as_a_missing_extra():
    _, get = import_on_use("bucketrank.data", {"bucketrank.data.no_such_module": "name"})
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'bucketrank\.data\.no_such_module'$"):
        get("name")
