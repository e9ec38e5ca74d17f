"""Train an RT-DETR with the Hugging Face Trainer, by its own loss and by a ranking loss; print the AP of both."""

import sys

import numpy as np
import torch
from faster_coco_eval import COCO, COCOeval_faster
from PIL import Image, ImageDraw
from transformers import RTDetrConfig, RTDetrForObjectDetection, RTDetrImageProcessor, Trainer, TrainingArguments

from bucketrank.integrations.transformers import use_ranking_loss


def draw_shapes(count, size, seed):  # three rectangles and ellipses an image, annotated as COCO does
    draw, shapes = np.random.default_rng(seed), []
    images = [{"id": i, "picture": Image.fromarray(draw.integers(0, 90, (size, size, 3), "u1"))} for i in range(count)]
    for i in range(3 * count):
        kind, (w, h) = int(draw.integers(2)), draw.integers(size // 8, size // 3, 2).tolist()
        x, y, *colour = draw.integers((0, 0, 120, 120, 120), (size - w, size - h, 256, 256, 256)).tolist()
        pen = ImageDraw.Draw(images[i // 3]["picture"])  # type: ignore[arg-type]
        (pen.rectangle, pen.ellipse)[kind]((x, y, x + w - 1, y + h - 1), fill=tuple(colour))
        shapes.append({"image_id": i // 3, "category_id": kind, "bbox": [x, y, w, h]})
    return COCO({"images": images, "categories": [{"id": 0}, {"id": 1}], "annotations": []}).loadRes(shapes)


def collate(images, truth, processor, folder):
    pictures = [i.get("picture") or Image.open(f"{folder}/images/{i['file_name']}").convert("RGB") for i in images]
    objects = [{"image_id": i["id"], "annotations": truth.imgToAnns[i["id"]]} for i in images]
    return processor(pictures, objects, return_tensors="pt")


def main(folder="", checkpoint="", steps=300, count=300, size=64, lr=1e-3):
    old, new = (COCO(f"{folder}/{s}.json") if folder else draw_shapes(count, size, len(s)) for s in ("train", "val"))
    processor = RTDetrImageProcessor(size=dict.fromkeys(("height", "width"), 640 if checkpoint else size))
    net = {"model_type": "rt_detr_resnet", "hidden_sizes": [64] * 4, "depths": [1] * 4, "out_indices": [2, 3, 4]}
    small = {"encoder_in_channels": [64] * 3, "encoder_hidden_dim": 64, "decoder_in_channels": [64] * 3, "d_model": 64}
    small |= {"num_queries": 30, "num_denoising": 20, "decoder_layers": 2, "freeze_backbone_batch_norms": False}
    config = RTDetrConfig(backbone_config=net, num_labels=max(old.cats) + 1, **small)
    args = TrainingArguments("runs", max_steps=steps, learning_rate=lr, save_strategy="no", remove_unused_columns=False)
    for loss in ("own", "ranking"):
        torch.manual_seed(0)  # the same weights for both
        found, model = [], RTDetrForObjectDetection(config)
        if checkpoint:
            model = model.from_pretrained(checkpoint, num_labels=config.num_labels, ignore_mismatched_sizes=True)
        if loss == "ranking":
            use_ranking_loss(model)
        Trainer(model, args, lambda images: collate(images, old, processor, folder), [*old.imgs.values()]).train()
        for image in new.imgs.values():
            inputs = collate([image], new, processor, folder).to(model.device)
            output, shape = model.eval()(inputs["pixel_values"]), inputs["labels"][0]["orig_size"]
            scores, labels, boxes = processor.post_process_object_detection(output, 0.0, shape[None])[0].values()
            extent = (boxes[:, :2], boxes[:, 2:] - boxes[:, :2])
            found.append(torch.column_stack([torch.full_like(scores, image["id"]), *extent, scores, labels]).detach())
        evaluation = COCOeval_faster(new, new.loadRes(torch.cat(found).cpu().numpy()), "bbox", print_function=len)
        evaluation.run()
        print(f"{loss} loss: AP {evaluation.stats[0]:.3f}, AP50 {evaluation.stats[1]:.3f}")


if __name__ == "__main__":  # [folder [checkpoint]]: COCO format, with images/, train.json, val.json; an RT-DETR
    main(*sys.argv[1:])
