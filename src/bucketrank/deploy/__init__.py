"""Prediction with a trained detector, and its export to ONNX.

Names are imported on first use, so that the command line shows its help without loading torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bucketrank.deploy.onnx import Agreement, ExportError, export_onnx
    from bucketrank.deploy.prediction import predict
    from bucketrank.deploy.prediction_files import predict_files

_MODULES = {
    "Agreement": "onnx",
    "ExportError": "onnx",
    "export_onnx": "onnx",
    "predict": "prediction",
    "predict_files": "prediction_files",
}

__all__ = ["Agreement", "ExportError", "export_onnx", "predict", "predict_files"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"bucketrank.deploy.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'bucketrank.deploy' has no attribute {name!r}")
