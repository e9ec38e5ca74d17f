"""The API page: every public name is on it, and every parameter is described."""

from __future__ import annotations

import dataclasses
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import pytest

from tests.test_docs import WIDEST

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
PACKAGES = [
    "bucketrank",
    "bucketrank.evaluation.calibration",
    "bucketrank.settings",
    "bucketrank.data",
    "bucketrank.inference",
    "bucketrank.detectors",
    "bucketrank.evaluation",
    "bucketrank.integrations.torchvision",
    "bucketrank.integrations.transformers",
    "bucketrank.weights",
    "bucketrank.detectors.assignment",
    "bucketrank.report",
    "bucketrank.training",
]
PATHS = re.findall(r"^::: (\S+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)  # a paragraph that opens with a prompt
DELEGATES = re.compile(r":func:`~(bucketrank\.[\w.]+)`")


def resolve(path: str) -> Any:
    """Return the object of a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def undescribed(subject: Any) -> set[str]:
    """Return the parameters or fields that neither the docstring nor a comment nor a help text describes."""
    if isinstance(subject, type) and issubclass(subject, BaseException):
        return set()
    doc = inspect.getdoc(subject) or ""
    names = {name for name in inspect.signature(subject).parameters if not name.startswith("_")}
    missing = {name for name in names if not re.search(rf"^    {name}: \S", doc, re.MULTILINE)}
    missing -= {name for name in missing if f"``{name}``" in doc}
    if missing and isinstance(subject, type):
        missing -= described_fields(subject)
    if missing and (function := DELEGATES.search(doc)):  # a module has the settings of its function
        missing = (missing - set(inspect.signature(resolve(function[1])).parameters)) | undescribed(
            resolve(function[1])
        )
    return missing


def described_fields(subject: type) -> set[str]:
    """Return the fields of a class, and of its bases, that have a help text or a comment on their line."""
    classes = [each for each in subject.__mro__ if each.__module__.startswith("bucketrank")]
    source = "\n".join(inspect.getsource(each) for each in classes)
    helped = set()
    if dataclasses.is_dataclass(subject):
        hints = get_type_hints(subject, include_extras=True)
        helped = {name for name, hint in hints.items() if get_origin(hint) is Annotated}
    return helped | set(re.findall(r"^    (\w+): .+  # \S", source, re.MULTILINE))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_on_the_page(package: str) -> None:
    on_page = [resolve(path) for path in PATHS]
    public = {name: getattr(import_module(package), name) for name in import_module(package).__all__}
    missing = [name for name, value in public.items() if callable(value) and value not in on_page]
    # The function is the method of a class that is on the page.
    assert [name for name in missing if name != "from_pretrained"] == []


def test_no_name_that_is_imported_on_use_is_that_of_a_module() -> None:
    """Python sets the name to the module once that is imported."""
    lazy = [package for package in map(import_module, PACKAGES) if "__getattr__" in vars(package)]
    assert len(lazy) > 5
    modules = [Path(package.__path__[0]) / f"{name}.py" for package in lazy for name in package.__all__]
    assert [module for module in modules if module.exists()] == []


def test_no_path_on_the_page_is_that_of_a_module() -> None:
    """The page would show the module instead of the function of the same name, without its parameters."""
    source = PAGE.parents[1] / "src"
    assert [path for path in PATHS if source.joinpath(*path.split(".")).with_suffix(".py").exists()] == []


@pytest.mark.parametrize("path", PATHS)
def test_examples_fit_on_the_page(path: str) -> None:
    doc = inspect.getdoc(resolve(path)) or ""
    lines = [line for example in EXAMPLE.findall(doc) for line in example.splitlines()]
    assert [line for line in lines if len(line) > WIDEST] == []


def test_no_name_is_on_the_page_twice() -> None:
    assert len(PATHS) == len({id(resolve(path)) for path in PATHS})


@pytest.mark.parametrize("path", PATHS)
def test_every_parameter_is_described(path: str) -> None:
    assert undescribed(resolve(path)) == set()


@pytest.mark.parametrize("method", ["from_pretrained", "save_pretrained", "push_to_hub", "predict"])
def test_every_parameter_of_a_trained_detectors_methods_is_described(method: str) -> None:
    assert undescribed(getattr(resolve("bucketrank.inference.TrainedDetector"), method)) <= {"self"}


def test_that_test_bites() -> None:
    def half(one: int, other: int, third: int) -> None:
        """Take ``one``.

        Args:
            other: a number.
        """

    @dataclasses.dataclass
    class Fields:
        """Two numbers."""

        helped: Annotated[int, "a number"]
        bare: int

    assert undescribed(half) == {"third"}
    assert "bare" in undescribed(Fields)
