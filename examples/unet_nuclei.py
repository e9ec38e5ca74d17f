"""Train a small U-Net with BCE and with AP loss, one ranking of pixels per image; print AP and IoU of both."""
# python examples/unet_nuclei.py [folder]  (COCO format with masks: images/, train.json, val.json; default: drawn discs)

import sys

import torch
from faster_coco_eval import COCO
from PIL import Image
from torch import nn
from torchvision.transforms.functional import to_tensor

from bucketrank import ap_loss


def draw_discs(count, size):  # bright discs of three sizes in noise; returns images (1, H, W) and masks (H, W)
    y, x = torch.meshgrid(torch.arange(float(size)), torch.arange(float(size)), indexing="ij")
    samples = []
    for _ in range(count):
        discs = torch.rand(6, 3) * torch.tensor([size, size, size / 10])
        mask = torch.stack([(x - cx).hypot(y - cy) < 2 + r for cx, cy, r in discs]).any(0)
        samples.append(((0.3 * mask + 0.4 * torch.rand(size, size))[None], mask))
    return samples


def read_folder(folder, split, size):  # the top left corner of each image, padded to the size
    dataset, samples = COCO(f"{folder}/{split}.json"), []
    for i, record in dataset.imgs.items():
        image = to_tensor(Image.open(f"{folder}/images/{record['file_name']}").convert("L"))
        mask = torch.zeros(image.shape[1:], dtype=torch.bool)
        for annotation in dataset.imgToAnns[i]:
            mask |= torch.from_numpy(dataset.annToMask(annotation)).bool()
        pad = (0, max(0, size - mask.shape[1]), 0, max(0, size - mask.shape[0]))
        image, mask = (nn.functional.pad(part, pad)[..., :size, :size] for part in (image, mask))
        samples.append(((image - image.mean()) / image.std().clamp(min=0.01), mask))
    return samples


def block(before, after):
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Three resolutions with skip connections; the logits (B, H, W) of the pixels."""

    def __init__(self, width=8):
        super().__init__()
        self.down = nn.ModuleList([block(1, width), block(width, 2 * width), block(2 * width, 4 * width)])
        self.up = nn.ModuleList([block(6 * width, 2 * width), block(3 * width, width)])
        self.logits = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        skipped: list[torch.Tensor] = []
        for down in self.down:
            x = down(nn.functional.max_pool2d(x, 2) if skipped else x)
            skipped.append(x)
        for up, skip in zip(self.up, reversed(skipped[:-1]), strict=True):
            x = up(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), skip], 1))
        return self.logits(x)[:, 0]


def pixel_ap(logits, masks):  # every image is a ranking of its pixels
    return ap_loss(logits, masks, sizes=[masks[0].numel()] * len(masks))


def measure(logits, masks):  # mean precision at the pixels of objects, and the IoU at the best threshold
    hits = masks.flatten()[logits.flatten().argsort(descending=True)].double()
    found, chosen = hits.cumsum(0), torch.arange(1, len(hits) + 1)
    return (found / chosen * hits).sum() / hits.sum(), (found / (chosen + hits.sum() - found)).max()


def main(folder="", steps=150, batch=4, count=60, size=128, rate=3e-3):
    torch.manual_seed(0)
    splits = [read_folder(folder, split, size) if folder else draw_discs(count, size) for split in ("train", "val")]
    train, val = ([torch.stack(part) for part in zip(*split, strict=True)] for split in splits)
    for name, loss in (("BCE", nn.functional.binary_cross_entropy_with_logits), ("AP", pixel_ap)):
        torch.manual_seed(0)  # the same weights and batches for both losses
        model = UNet()
        optimiser = torch.optim.Adam(model.parameters(), rate)
        for _ in range(steps):
            chosen = torch.randint(len(train[0]), (batch,))
            optimiser.zero_grad()
            loss(model(train[0][chosen]), train[1][chosen].float()).backward()
            optimiser.step()
        with torch.no_grad():
            logits = torch.cat([model.eval()(image[None]) for image in val[0]])
        ap, iou = measure(logits, val[1])
        print(f"{name} loss: AP {ap:.3f}, IoU {iou:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
