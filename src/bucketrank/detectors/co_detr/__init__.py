"""Co-DETR (Zong et al., ICCV 2023), called BRS-DETR with RS loss; ``model`` joins the parts."""

from bucketrank.detectors.co_detr.model import CoDETR

__all__ = ["CoDETR"]
