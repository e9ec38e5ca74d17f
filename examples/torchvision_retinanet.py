"""Train a torchvision RetinaNet with its own loss and with a ranking loss, from the same weights; print both APs."""
# python examples/torchvision_retinanet.py [folder]  (COCO format: images/, train.json, val.json; default: drawn shapes)

import sys

import torch
from faster_coco_eval import COCO, COCOeval_faster
from PIL import Image
from torchvision.models import resnet18
from torchvision.models.detection import RetinaNet, anchor_utils, backbone_utils
from torchvision.transforms.functional import to_tensor

from bucketrank.integrations.torchvision import use_ranking_loss


def draw_shapes(count, size):  # three diamonds, discs or squares per image, in COCO format
    images, shapes, axis = 0.4 * torch.rand(count, 3, size, size), [], torch.arange(float(size))
    for i in range(3 * count):
        label, r = int(torch.randint(3, ())), int(torch.randint(size // 16, size // 5, ()))
        x, y = torch.randint(r, size - r, (2,)).tolist()
        inside = torch.stack(torch.meshgrid(axis - y, axis - x, indexing="ij")).norm([1, 2, torch.inf][label], 0) <= r
        images[i % count][:, inside] = 0.5 + 0.5 * torch.rand(3, 1)
        shapes.append({"image_id": i % count, "category_id": label, "bbox": [x - r, y - r, 2 * r + 1, 2 * r + 1]})
    records = [{"id": i, "pixels": images[i]} for i in range(count)]
    return COCO({"images": records, "categories": [{"id": k} for k in range(3)], "annotations": []}).loadRes(shapes)


def sample(dataset, i, folder):
    objects, file = [a for a in dataset.imgToAnns[i] if not a["iscrowd"]], dataset.imgs[i].get("file_name")
    image = to_tensor(Image.open(f"{folder}/images/{file}").convert("RGB")) if folder else dataset.imgs[i]["pixels"]
    boxes = torch.tensor([(x, y, x + w, y + h) for x, y, w, h in (a["bbox"] for a in objects)]).reshape(-1, 4).float()
    return image, {"boxes": boxes, "labels": torch.tensor([a["category_id"] for a in objects], dtype=torch.int64)}


def main(folder="", steps=300, batch=8, count=400, size=128, lr=5e-4):
    for loss in ("own", "ranking"):
        torch.manual_seed(0)  # the same images, weights and batches for both losses
        train, val = (COCO(f"{folder}/{s}.json") if folder else draw_shapes(count, size) for s in ("train", "val"))
        fpn = backbone_utils.BackboneWithFPN(resnet18(), {f"layer{k}": k for k in (2, 3, 4)}, [128, 256, 512], 64)
        anchors = anchor_utils.AnchorGenerator(((16, 24), (32, 48), (64, 96), (128, 192)), ((1.0,),) * 4)
        model = RetinaNet(fpn, max(train.cats) + 1, size, 2 * size, anchor_generator=anchors, score_thresh=0.0)
        if loss == "ranking":
            use_ranking_loss(model)
        optimiser, detections = torch.optim.AdamW(model.parameters(), lr), []
        for _ in range(steps):
            samples = [sample(train, list(train.imgs)[k], folder) for k in torch.randint(len(train.imgs), (batch,))]
            optimiser.zero_grad()
            sum(model(*zip(*samples, strict=True)).values()).backward()
            optimiser.step()
        for i in val.imgs:
            boxes, scores, labels = (value.detach() for value in model.eval()([sample(val, i, folder)[0]])[0].values())
            extent = (boxes[:, :2], boxes[:, 2:] - boxes[:, :2])
            detections.append(torch.column_stack([torch.full_like(scores, i), *extent, scores, labels]))
        evaluation = COCOeval_faster(val, val.loadRes(torch.cat(detections).numpy()), "bbox", print_function=len)
        evaluation.run()
        print(f"{loss} loss: AP {evaluation.stats[0]:.3f}, AP50 {evaluation.stats[1]:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
