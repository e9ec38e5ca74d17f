"""Co-DETR (Zong et al., ICCV 2023), with ranking losses BRS-DETR: ``detector`` joins the parts, each is one file."""

from bucketrank.detectors.co_detr.co_detr import CoDETR

__all__ = ["CoDETR"]
