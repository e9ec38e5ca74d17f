"""A trained detector in use: predictions, evaluation, calibration, export to ONNX, and sharing on the hub."""

from typing import TYPE_CHECKING

from bucketrank.lazy import import_on_use

if TYPE_CHECKING:
    from bucketrank.deploy.calibrated_weights import calibrate_weights as calibrate_weights
    from bucketrank.deploy.onnx import Agreement as Agreement
    from bucketrank.deploy.onnx import ExportError as ExportError
    from bucketrank.deploy.onnx import export_onnx as export_onnx
    from bucketrank.deploy.prediction import predict as predict
    from bucketrank.deploy.prediction_files import predict_files as predict_files
    from bucketrank.deploy.trained_detector import TrainedDetector as TrainedDetector
    from bucketrank.deploy.trained_detector import from_pretrained as from_pretrained
    from bucketrank.deploy.weights_evaluation import Evaluation as Evaluation
    from bucketrank.deploy.weights_evaluation import evaluate as evaluate

__all__, __getattr__ = import_on_use(
    __name__,
    {
        "bucketrank.deploy.calibrated_weights": ("calibrate_weights",),
        "bucketrank.deploy.weights_evaluation": ("Evaluation", "evaluate"),
        "bucketrank.deploy.onnx": ("Agreement", "ExportError", "export_onnx"),
        "bucketrank.deploy.prediction": ("predict",),
        "bucketrank.deploy.prediction_files": ("predict_files",),
        "bucketrank.deploy.trained_detector": ("TrainedDetector", "from_pretrained"),
    },
)
