"""Convert Cityscapes gtFine, Pascal VOC and YOLO data sets to a folder in COCO format."""

from typing import TYPE_CHECKING

from bucketrank.lazy import import_on_use

if TYPE_CHECKING:
    from bucketrank.data.convert.formats import convert_cityscapes as convert_cityscapes
    from bucketrank.data.convert.formats import convert_voc as convert_voc
    from bucketrank.data.convert.formats import convert_yolo as convert_yolo
    from bucketrank.data.convert.writer import Written as Written

__all__, __getattr__ = import_on_use(
    __name__,
    {
        "bucketrank.data.convert.formats": "convert_cityscapes convert_voc convert_yolo",
        "bucketrank.data.convert.writer": "Written",
    },
)
