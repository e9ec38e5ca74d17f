"""Calibrated scores: fit a map from scores to probabilities on detections, and fold it into the last layer."""

from typing import TYPE_CHECKING

from bucketrank.lazy import import_on_use

if TYPE_CHECKING:
    from bucketrank.calibration.calibrate_model import calibrate as calibrate
    from bucketrank.calibration.calibrate_model import fit as fit
    from bucketrank.calibration.calibration_result import Calibration as Calibration
    from bucketrank.calibration.folding import fold as fold
    from bucketrank.calibration.score_head import CannotCalibrateError as CannotCalibrateError
    from bucketrank.calibration.score_head import ScoreHead as ScoreHead
    from bucketrank.calibration.score_map import ScoreMap as ScoreMap

__all__, __getattr__ = import_on_use(
    __name__,
    {
        "bucketrank.calibration.calibrate_model": ("calibrate", "fit"),
        "bucketrank.calibration.calibration_result": ("Calibration",),
        "bucketrank.calibration.folding": ("fold",),
        "bucketrank.calibration.score_head": ("CannotCalibrateError", "ScoreHead"),
        "bucketrank.calibration.score_map": ("ScoreMap",),
    },
)
