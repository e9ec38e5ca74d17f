"""Co-DETR (Zong et al., ICCV 2023), called BRS-DETR with RS loss, and Co-DINO."""

from bucketrank.detectors.co_detr.dino import CoDINO
from bucketrank.detectors.co_detr.model import CoDETR

__all__ = ["CoDETR", "CoDINO"]
