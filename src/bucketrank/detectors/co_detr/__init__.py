"""Co-DETR (Zong et al., ICCV 2023), called BRS-DETR with RS loss. ``co_detr`` joins the parts, one file each."""

from bucketrank.detectors.co_detr.model import CoDETR

__all__ = ["CoDETR"]
