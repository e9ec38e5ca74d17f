"""The data flow of each detector under a ranking loss: python -m docs.figures.detectors."""

from __future__ import annotations

from functools import partial

from matplotlib.figure import Figure

from docs.figures.flow import Arrow, Box, draw_flow
from docs.figures.theme import Palette, save

Flow = tuple[dict[str, Box], list[Arrow]]


def dense(assignment: str, anchors: str) -> Flow:
    boxes = {
        "images": Box(0, 0, "images", "input"),
        "backbone": Box(1, 0, "backbone\nC3 to C5"),
        "neck": Box(2, 0, "pyramid\nP3 to P7"),
        "head": Box(3, 0, "head, shared by\nthe levels"),
        "logits": Box(4, 0, "logits\nanchors x classes"),
        "boxes": Box(4, 1, "boxes decoded\nfrom their codes"),
        "anchors": Box(2, 1, anchors),
        "objects": Box(0, 1, "objects", "input"),
        "assign": Box(2, 2, assignment),
        "iou": Box(4, 2, "IoU of positives\nwith their objects"),
        "rank": Box(5, 0, "RS over batch,\nlevels and classes", "loss"),
        "box": Box(5, 1, "GIoU, weighted by\nconfidence, = RS", "loss"),
    }
    arrows = [
        Arrow("images", "backbone"),
        Arrow("backbone", "neck"),
        Arrow("neck", "head"),
        Arrow("head", "logits"),
        Arrow("head", "boxes"),
        Arrow("anchors", "assign"),
        Arrow("objects", "assign"),
        Arrow("assign", "iou", "positives", detached=True),
        Arrow("boxes", "iou", detached=True),
        Arrow("iou", "rank", "labels", detached=True),
        Arrow("logits", "rank"),
        Arrow("boxes", "box"),
    ]
    return boxes, arrows


def paa() -> Flow:
    boxes, arrows = dense("PAA: two Gaussians\nover the losses", "anchors of\nIoU 0.1 or more")
    boxes["scores"] = Box(3, 1, "focal + GIoU of\neach candidate")
    boxes["assign"] = Box(3, 2, boxes["assign"].text)
    arrows.remove(Arrow("anchors", "assign"))
    arrows += [
        Arrow("head", "scores", detached=True),
        Arrow("scores", "assign", detached=True),
        Arrow("anchors", "scores", detached=True),
    ]
    return boxes, arrows


def rcnn(*, masks: bool = False) -> Flow:
    boxes = {
        "images": Box(0, 0, "images", "input"),
        "backbone": Box(1, 0, "backbone\nC2 to C5"),
        "neck": Box(2, 0, "pyramid\nP2 to P6"),
        "rpn": Box(3, 0, "RPN: objectness\nof all anchors"),
        "rpn loss": Box(4, 0, "0.2 (RS + GIoU)\nall anchors", "loss"),
        "proposals": Box(3, 1, "1000 proposals,\nnone sampled"),
        "objects": Box(1, 1, "objects", "input"),
        "roi": Box(3, 2, "RoIAlign,\ntwo hidden layers"),
        "logits": Box(4, 2, "logits, no\nbackground"),
        "boxes": Box(4, 3, "a box for\neach class"),
        "rank": Box(5, 2, "RS over proposals\nx classes of batch", "loss"),
        "box": Box(5, 3, "GIoU, weighted by\nconfidence, = RS", "loss"),
    }
    arrows = [
        Arrow("images", "backbone"),
        Arrow("backbone", "neck"),
        Arrow("neck", "rpn"),
        Arrow("rpn", "rpn loss"),
        Arrow("rpn", "proposals", "NMS 0.7", detached=True),
        Arrow("objects", "proposals", "added"),
        Arrow("proposals", "roi"),
        Arrow("neck", "roi"),
        Arrow("roi", "logits"),
        Arrow("roi", "boxes"),
        Arrow("logits", "rank"),
        Arrow("boxes", "box"),
        Arrow("boxes", "rank", "IoU", detached=True),
    ]
    if masks:
        boxes["mask head"] = Box(4, 4, "mask head,\n28 x 28")
        boxes["mask"] = Box(5, 4, "Dice, weighted by\nconfidence, = RS", "loss")
        boxes["positives"] = Box(3, 4, "positives,\nat most 200")
        arrows += [
            Arrow("roi", "positives", detached=True),
            Arrow("positives", "mask head"),
            Arrow("mask head", "mask"),
        ]
    return boxes, arrows


def cascade() -> Flow:
    boxes = {
        "images": Box(0, 0, "images", "input"),
        "backbone": Box(1, 0, "backbone\nC2 to C5"),
        "neck": Box(2, 0, "pyramid\nP2 to P6"),
        "rpn": Box(3, 0, "RPN: objectness\nof all anchors"),
        "rpn loss": Box(4, 0, "0.2 (RS + GIoU)\nall anchors", "loss"),
        "proposals": Box(3, 1, "2000 proposals\nand the objects"),
    }
    arrows = [
        Arrow("images", "backbone"),
        Arrow("backbone", "neck"),
        Arrow("neck", "rpn"),
        Arrow("rpn", "rpn loss"),
        Arrow("rpn", "proposals", detached=True),
    ]
    before = "proposals"
    for stage, iou in enumerate((0.5, 0.6, 0.7), start=1):
        boxes[f"stage {stage}"] = Box(stage + 2, 2, f"stage {stage}\npositive from IoU {iou}")
        boxes[f"loss {stage}"] = Box(stage + 2, 3, "RS over proposals\nx classes, + GIoU", "loss")
        text = "" if stage == 1 else "refined"
        arrows += [
            Arrow(before, f"stage {stage}", text, detached=True),
            Arrow(f"stage {stage}", f"loss {stage}"),
        ]
        before = f"stage {stage}"
    return boxes, arrows


def co_detr() -> Flow:
    boxes = {
        "images": Box(0, 0, "images", "input"),
        "backbone": Box(0, 1, "backbone\nC3 to C5"),
        "neck": Box(0, 2, "4 maps of one width,\nstrides 8 to 64"),
        "encoder": Box(0, 3, "encoder, 6 layers\nof deformable attention"),
        "proposals": Box(1, 0, "two-stage: a score and\na box for every token"),
        "proposal loss": Box(3, 0, "2 (RS + L1 + GIoU)\none class, valid tokens", "loss"),
        "queries": Box(1, 1, "300 queries, where\nthe best boxes are"),
        "decoder": Box(2, 1, "decoder, 6 layers, over\nthe encoder's tokens"),
        "decoder loss": Box(3, 1, "6 x 2 (RS + L1 + GIoU)\nHungarian, one-to-one", "loss"),
        "maps": Box(0, 4, "its tokens as maps, with\na 5th of stride 128"),
        "heads": Box(1, 2, "Faster R-CNN:\nRPN, then RoI head"),
        "head loss": Box(3, 2, "1 (RS + GIoU) and\n5 (RS + GIoU)", "loss"),
        "rcnn queries": Box(1, 3, "queries of its positives,\n9 to 300 an image"),
        "again": Box(2, 3, "the same decoder"),
        "again loss": Box(3, 3, "6 x 2 (RS + L1 + GIoU)\none-to-many", "loss"),
        "atss": Box(1, 4, "ATSS, one anchor\na place"),
        "atss loss": Box(3, 4, "5 (RS + GIoU)", "loss"),
        "atss queries": Box(1, 5, "queries of its positives,\n9 to 300 an image"),
        "once more": Box(2, 5, "the same decoder"),
        "once more loss": Box(3, 5, "6 x 2 (RS + L1 + GIoU)\none-to-many", "loss"),
    }
    arrows = [
        Arrow("images", "backbone"),
        Arrow("backbone", "neck"),
        Arrow("neck", "encoder"),
        Arrow("encoder", "proposals"),
        Arrow("proposals", "proposal loss"),
        Arrow("proposals", "queries", detached=True),
        Arrow("queries", "decoder"),
        Arrow("decoder", "decoder loss"),
        Arrow("encoder", "maps"),
        Arrow("maps", "heads"),
        Arrow("maps", "atss"),
        Arrow("heads", "head loss"),
        Arrow("heads", "rcnn queries", "boxes without gradient, features with"),
        Arrow("rcnn queries", "again"),
        Arrow("again", "again loss"),
        Arrow("atss", "atss loss"),
        Arrow("atss", "atss queries", "boxes without gradient, features with"),
        Arrow("atss queries", "once more"),
        Arrow("once more", "once more loss"),
    ]
    return boxes, arrows


FLOWS: dict[str, Flow] = {
    "faster-rcnn": rcnn(),
    "mask-rcnn": rcnn(masks=True),
    "cascade-rcnn": cascade(),
    "retinanet": dense("positive from\nIoU 0.5 on", "6 anchors\na place"),
    "atss": dense("ATSS: 9 nearest\na level, mean + std", "3 anchors\na place"),
    "paa": paa(),
    "brs-detr": co_detr(),
}


def draw(flow: Flow, palette: Palette) -> Figure:
    return draw_flow(*flow, palette)


if __name__ == "__main__":
    for name, flow in FLOWS.items():
        save(f"flow-{name}", partial(draw, flow))
