"""Use a trained detector: predict, evaluate, calibrate, export to ONNX, and share it on the hub."""

from typing import TYPE_CHECKING

from bucketrank.lazy import import_on_use

if TYPE_CHECKING:
    from bucketrank.errors import ExportError as ExportError
    from bucketrank.inference.detections import Detections as Detections
    from bucketrank.inference.evaluation import Evaluation as Evaluation
    from bucketrank.inference.evaluation import calibrate_weights as calibrate_weights
    from bucketrank.inference.evaluation import evaluate as evaluate
    from bucketrank.inference.hub import TrainedDetector as TrainedDetector
    from bucketrank.inference.hub import from_pretrained as from_pretrained
    from bucketrank.inference.onnx import Agreement as Agreement
    from bucketrank.inference.onnx import export_onnx as export_onnx
    from bucketrank.inference.prediction import predict as predict
    from bucketrank.inference.prediction import predict_files as predict_files

__all__, __getattr__ = import_on_use(
    __name__,
    {
        "bucketrank.errors": "ExportError",
        "bucketrank.inference.detections": "Detections",
        "bucketrank.inference.evaluation": "Evaluation calibrate_weights evaluate",
        "bucketrank.inference.hub": "TrainedDetector from_pretrained",
        "bucketrank.inference.onnx": "Agreement export_onnx",
        "bucketrank.inference.prediction": "predict predict_files",
    },
)
