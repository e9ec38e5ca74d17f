"""The results of a benchmark, read from its JSON: such a file comes from another machine, often one with a GPU."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from bucketrank.errors import short_repr

BENCHMARKS = ("losses", "detectors")

BenchT = TypeVar("BenchT")


class BenchFileError(ValueError):
    """A file does not hold the results of a benchmark; the message names the file and the problem."""


def read_document(path: Path) -> dict[str, Any]:
    """Return the document in the file, as ``bench losses`` or ``bench detectors`` wrote it."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchFileError(f"{path}: expected the JSON of a benchmark, got {error}") from error
    except RecursionError as error:
        raise BenchFileError(f"{path}: expected the JSON of a benchmark, got values nested too deeply") from error
    if not isinstance(document, dict) or document.get("benchmark") not in BENCHMARKS:
        raise BenchFileError(f"{path}: expected the results of bench {' or '.join(BENCHMARKS)}, got other content")
    return document


def restore_bench(bench: type[BenchT], document: dict[str, Any]) -> BenchT:
    """Return the dataclass that :func:`bucketrank.bench.bench_documents.json_document` wrote."""
    try:
        restored: BenchT = _restore(bench, document)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BenchFileError(f"expected the results of {bench.__name__}, got wrong fields: {error!r}") from error
    return restored


def _restore(annotation: Any, value: Any) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return None if value is None else _restore(arguments[0], value)
    if origin is list:
        return [_restore(arguments[0], each) for each in value]
    if origin is tuple:
        return tuple(_restore(arguments[0], each) for each in value)
    if origin is dict:
        return {_restore(arguments[0], key): _restore(arguments[1], each) for key, each in value.items()}
    if is_dataclass(annotation) and isinstance(annotation, type):
        return _restore_dataclass(annotation, value)
    if annotation is str and not isinstance(value, str):
        raise TypeError(f"expected a text, got {short_repr(value)}")
    return annotation(value) if annotation in (int, float) else value


def _restore_dataclass(annotation: type, values: dict[str, Any]) -> Any:
    hints = get_type_hints(annotation)
    # Not by the constructor: the settings of another machine may name a device that this machine does not have.
    restored: Any = object.__new__(annotation)
    for field in fields(annotation):
        if field.name in values:
            value = _restore(hints[field.name], values[field.name])
        elif field.default is not MISSING:  # added to the results after the file was written
            value = field.default
        elif field.default_factory is not MISSING:
            value = field.default_factory()
        else:
            raise KeyError(field.name)
        object.__setattr__(restored, field.name, value)
    return restored
