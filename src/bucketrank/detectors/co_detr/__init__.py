"""Co-DETR (Zong et al., ICCV 2023), with ranking losses BRS-DETR: ``detector`` joins the parts, each is one file."""

from bucketrank.detectors.co_detr.detector import CoDETR

__all__ = ["CoDETR"]
