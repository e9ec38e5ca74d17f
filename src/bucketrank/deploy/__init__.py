"""What a trained detector is for: predictions on pictures, and export to ONNX."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bucketrank.deploy.files import predict_files
    from bucketrank.deploy.onnx import Agreement, ExportError, export_onnx
    from bucketrank.deploy.prediction import predict

_HOME = {
    "Agreement": "onnx",
    "ExportError": "onnx",
    "export_onnx": "onnx",
    "predict": "prediction",
    "predict_files": "files",
}

__all__ = ["Agreement", "ExportError", "export_onnx", "predict", "predict_files"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"bucketrank.deploy.{_HOME[name]}"), name)
    raise AttributeError(f"module 'bucketrank.deploy' has no attribute {name!r}")
