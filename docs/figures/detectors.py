"""The data flow of each detector under a ranking loss: python -m docs.figures.detectors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from matplotlib.figure import Figure

from docs.figures.flow import Arrow, Box, draw_flow
from docs.figures.theme import Palette, save

Flow = tuple[dict[str, Box], list[Arrow]]


def dense(assignment: str, anchors: str) -> Flow:
    boxes = {
        "images": Box(0, 0, "images", "input"),
        "backbone": Box(0, 1, "backbone\nC3 to C5"),
        "neck": Box(0, 2, "pyramid\nP3 to P7"),
        "objects": Box(0, 3, "ground-truth\nboxes", "input"),
        "head": Box(1, 2, "head, shared by\nthe levels"),
        "assign": Box(1, 3, assignment),
        "anchors": Box(1, 4, anchors),
        "logits": Box(2, 1, "logits of anchors\nand classes"),
        "boxes": Box(2, 2, "boxes, decoded\nfrom box deltas"),
        "iou": Box(2, 3, "IoU of positives\nwith their objects"),
        "rank": Box(3, 1, "RS over batch,\nlevels and classes", "loss"),
        "box": Box(3, 2, "GIoU, weighted and\nbalanced to RS", "loss"),
    }
    arrows = [
        Arrow("images", "backbone"),
        Arrow("backbone", "neck"),
        Arrow("neck", "head"),
        Arrow("head", "logits"),
        Arrow("head", "boxes"),
        Arrow("anchors", "assign"),
        Arrow("objects", "assign"),
        Arrow("assign", "iou", detached=True),
        Arrow("boxes", "iou", detached=True),
        Arrow("iou", "rank", "labels", detached=True),
        Arrow("logits", "rank"),
        Arrow("boxes", "box"),
    ]
    return boxes, arrows


def paa() -> Flow:
    boxes, arrows = dense("PAA: two Gaussians\nover the losses", "anchors of\nIoU 0.1 or more")
    moved = {"anchors": (0, 3), "objects": (0, 4), "assign": (1, 4), "iou": (2, 4)}
    boxes |= {name: replace(boxes[name], column=column, row=row) for name, (column, row) in moved.items()}
    boxes["scores"] = Box(1, 3, "focal + GIoU loss of\neach candidate")
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
        "backbone": Box(0, 1, "backbone\nC2 to C5"),
        "neck": Box(0, 2, "pyramid\nP2 to P6"),
        "objects": Box(0, 3, "ground-truth\nboxes", "input"),
        "rpn": Box(1, 1, "RPN: objectness\nof all anchors"),
        "rpn loss": Box(2, 1, "0.2 (RS + GIoU),\nall anchors", "loss"),
        "proposals": Box(1, 3, "1000 proposals,\nno sampling"),
        "roi": Box(1, 4, "RoIAlign,\ntwo hidden layers"),
        "logits": Box(2, 4, "logits, no\nbackground"),
        "boxes": Box(2, 5, "a box for\neach class"),
        "rank": Box(3, 4, "RS over proposals\nand classes of batch", "loss"),
        "box": Box(3, 5, "GIoU, weighted and\nbalanced to RS", "loss"),
    }
    arrows = [
        Arrow("images", "backbone"),
        Arrow("backbone", "neck"),
        Arrow("neck", "rpn"),
        Arrow("rpn", "rpn loss"),
        Arrow("rpn", "proposals", "NMS 0.7", detached=True),
        Arrow("objects", "proposals"),
        Arrow("proposals", "roi"),
        Arrow("neck", "roi"),
        Arrow("roi", "logits"),
        Arrow("roi", "boxes"),
        Arrow("logits", "rank"),
        Arrow("boxes", "box"),
        Arrow("boxes", "rank", "IoU", detached=True),
    ]
    if masks:
        boxes["positives"] = Box(1, 6, "positives,\nat most 200")
        boxes["mask head"] = Box(2, 6, "mask head,\n28 x 28")
        boxes["mask"] = Box(3, 6, "Dice, weighted and\nbalanced to RS", "loss")
        arrows += [
            Arrow("roi", "positives", detached=True),
            Arrow("positives", "mask head"),
            Arrow("mask head", "mask"),
        ]
    return boxes, arrows


def cascade() -> Flow:
    boxes = {
        "images": Box(0, 0, "images", "input"),
        "backbone": Box(0, 1, "backbone\nC2 to C5"),
        "neck": Box(0, 2, "pyramid\nP2 to P6"),
        "objects": Box(0, 3, "ground-truth\nboxes", "input"),
        "rpn": Box(1, 2, "RPN: objectness\nof all anchors"),
        "rpn loss": Box(2, 2, "0.2 (RS + GIoU),\nall anchors", "loss"),
        "proposals": Box(1, 3, "2000 proposals,\nno sampling"),
    }
    arrows = [
        Arrow("images", "backbone"),
        Arrow("backbone", "neck"),
        Arrow("neck", "rpn"),
        Arrow("rpn", "rpn loss"),
        Arrow("rpn", "proposals", "NMS 0.7", detached=True),
        Arrow("objects", "proposals"),
    ]
    before = "proposals"
    for stage, iou in enumerate((0.5, 0.6, 0.7), start=1):
        boxes[f"stage {stage}"] = Box(stage, 4, f"stage {stage}\npositive from IoU {iou}")
        boxes[f"loss {stage}"] = Box(stage, 5, "RS over proposals\nand classes, GIoU", "loss")
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
        "queries": Box(1, 1, "300 queries at\nthe best boxes"),
        "decoder": Box(2, 1, "decoder, 6 layers, over\nthe encoder's tokens"),
        "decoder loss": Box(3, 1, "6 x 2 (RS + L1 + GIoU)\nHungarian, one-to-one", "loss"),
        "maps": Box(0, 4, "its tokens as maps, and\na 5th of stride 128"),
        "heads": Box(1, 2, "Faster R-CNN:\nRPN, then RoI head"),
        "head loss": Box(3, 2, "1 (RS + GIoU) and\n5 (RS + GIoU)", "loss"),
        "rcnn queries": Box(1, 3, "queries of its positives,\n9 to 300 per image"),
        "again": Box(2, 3, "the same decoder"),
        "again loss": Box(3, 3, "6 x 2 (RS + L1 + GIoU)\none-to-many", "loss"),
        "atss": Box(1, 4, "ATSS, one anchor\nper location"),
        "atss loss": Box(3, 4, "5 (RS + GIoU)", "loss"),
        "atss queries": Box(1, 5, "queries of its positives,\n9 to 300 per image"),
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
    "retinanet": dense("positive from\nan IoU of 0.5", "6 anchors\nper location"),
    "atss": dense("ATSS: 9 nearest per\nlevel, mean + std", "3 anchors\nper location"),
    "paa": paa(),
    "brs-detr": co_detr(),
}


def draw(flow: Flow, palette: Palette) -> Figure:
    return draw_flow(*flow, palette)


if __name__ == "__main__":
    for name, flow in FLOWS.items():
        save(f"flow-{name}", partial(draw, flow))
