"""Average precision by COCO's and LVIS's rules, optimal LRP, the threshold of the best F1, and calibration errors."""

from typing import TYPE_CHECKING

from bucketrank.lazy import import_on_use

if TYPE_CHECKING:
    from bucketrank.evaluation.calibration_error import CalibrationErrors as CalibrationErrors
    from bucketrank.evaluation.calibration_error import Reliability as Reliability
    from bucketrank.evaluation.detection_records import coco_records as coco_records
    from bucketrank.evaluation.evaluator import EvaluationResult as EvaluationResult
    from bucketrank.evaluation.evaluator import Evaluator as Evaluator
    from bucketrank.evaluation.image_bootstrap import BootstrapAP as BootstrapAP
    from bucketrank.evaluation.image_bootstrap import Difference as Difference
    from bucketrank.evaluation.image_bootstrap import ImageAP as ImageAP
    from bucketrank.evaluation.image_bootstrap import paired_difference as paired_difference
    from bucketrank.evaluation.matched_detections import MatchedDetections as MatchedDetections
    from bucketrank.evaluation.optimal_lrp import OptimalLRP as OptimalLRP
    from bucketrank.evaluation.threshold import Curve as Curve
    from bucketrank.evaluation.threshold import best_threshold as best_threshold

__all__, __getattr__ = import_on_use(
    __name__,
    {
        "bucketrank.evaluation.calibration_error": ("CalibrationErrors", "Reliability"),
        "bucketrank.evaluation.detection_records": ("coco_records",),
        "bucketrank.evaluation.evaluator": ("EvaluationResult", "Evaluator"),
        "bucketrank.evaluation.image_bootstrap": ("BootstrapAP", "Difference", "ImageAP", "paired_difference"),
        "bucketrank.evaluation.matched_detections": ("MatchedDetections",),
        "bucketrank.evaluation.optimal_lrp": ("OptimalLRP",),
        "bucketrank.evaluation.threshold": ("Curve", "best_threshold"),
    },
)
