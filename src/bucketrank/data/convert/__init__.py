"""Conversion of Cityscapes' gtFine, Pascal VOC and YOLO to a folder in COCO's format."""

from bucketrank.data.convert.cityscapes import convert_cityscapes
from bucketrank.data.convert.voc import convert_voc
from bucketrank.data.convert.writer import Written
from bucketrank.data.convert.yolo import convert_yolo

__all__ = ["Written", "convert_cityscapes", "convert_voc", "convert_yolo"]
