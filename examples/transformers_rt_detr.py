"""Train an RT-DETR with the Hugging Face Trainer, with its own loss and with a ranking loss; print both APs."""

import sys

import numpy as np
import torch
from faster_coco_eval import COCO, COCOeval_faster
from PIL import Image, ImageDraw
from transformers import RTDetrConfig, RTDetrForObjectDetection, RTDetrImageProcessor, Trainer, TrainingArguments

from bucketrank.integrations.transformers import use_ranking_loss


def draw_shapes(count, size, seed):  # three rectangles or ellipses per image, in COCO format
    random, shapes = np.random.default_rng(seed), []
    images = [{"id": i, "pixels": Image.fromarray(random.integers(0, 90, (size, size, 3), "u1"))} for i in range(count)]
    for i in range(3 * count):
        category, (w, h) = int(random.integers(2)), random.integers(size // 8, size // 3, 2).tolist()
        x, y, *colour = random.integers((0, 0, 120, 120, 120), (size - w, size - h, 256, 256, 256)).tolist()
        pen = ImageDraw.Draw(images[i // 3]["pixels"])  # type: ignore[arg-type]
        (pen.rectangle, pen.ellipse)[category]((x, y, x + w - 1, y + h - 1), fill=tuple(colour))
        shapes.append({"image_id": i // 3, "category_id": category, "bbox": [x, y, w, h]})
    return COCO({"images": images, "categories": [{"id": 0}, {"id": 1}], "annotations": []}).loadRes(shapes)


def collate(records, dataset, processor, folder):
    images = [i.get("pixels") or Image.open(f"{folder}/images/{i['file_name']}").convert("RGB") for i in records]
    objects = [{"image_id": i["id"], "annotations": dataset.imgToAnns[i["id"]]} for i in records]
    return processor(images, objects, return_tensors="pt")


def main(folder="", checkpoint="", steps=300, count=300, size=64, lr=1e-3):
    train, val = (COCO(f"{folder}/{s}.json") if folder else draw_shapes(count, size, len(s)) for s in ("train", "val"))
    processor = RTDetrImageProcessor(size=dict.fromkeys(("height", "width"), 640 if checkpoint else size))
    resnet = {"model_type": "rt_detr_resnet", "hidden_sizes": [64] * 4, "depths": [1] * 4, "out_indices": [2, 3, 4]}
    small = {"encoder_in_channels": [64] * 3, "encoder_hidden_dim": 64, "decoder_in_channels": [64] * 3, "d_model": 64}
    small |= {"num_queries": 30, "num_denoising": 20, "decoder_layers": 2, "freeze_backbone_batch_norms": False}
    config = RTDetrConfig(backbone_config=resnet, num_labels=max(train.cats) + 1, **small)
    args = TrainingArguments("runs", max_steps=steps, learning_rate=lr, save_strategy="no", remove_unused_columns=False)
    for loss in ("own", "ranking"):
        torch.manual_seed(0)  # the same weights for both losses
        detections, model = [], RTDetrForObjectDetection(config)
        if checkpoint:
            model = model.from_pretrained(checkpoint, num_labels=config.num_labels, ignore_mismatched_sizes=True)
        if loss == "ranking":
            use_ranking_loss(model)
        Trainer(model, args, lambda records: collate(records, train, processor, folder), [*train.imgs.values()]).train()
        for i, record in val.imgs.items():
            inputs = collate([record], val, processor, folder).to(model.device)
            output, shape = model.eval()(inputs["pixel_values"]), inputs["labels"][0]["orig_size"]
            scores, labels, boxes = processor.post_process_object_detection(output, 0.0, shape[None])[0].values()
            extent = (boxes[:, :2], boxes[:, 2:] - boxes[:, :2])
            detections.append(torch.column_stack([torch.full_like(scores, i), *extent, scores, labels]).detach())
        evaluation = COCOeval_faster(val, val.loadRes(torch.cat(detections).cpu().numpy()), "bbox", print_function=len)
        evaluation.run()
        print(f"{loss} loss: AP {evaluation.stats[0]:.3f}, AP50 {evaluation.stats[1]:.3f}")


if __name__ == "__main__":  # arguments: [folder in COCO format (images/, train.json, val.json) [RT-DETR checkpoint]]
    main(*sys.argv[1:])
