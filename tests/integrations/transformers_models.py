"""Small detection transformers with random weights, and a batch to train them on, without downloads."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor

SIDE = 64
CLASSES = 3
QUERIES = 12
LAYERS = 2


def resnet() -> Any:
    return hf.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )


def resnet_stride_8() -> Any:
    """Return the same backbone for models with one feature map: stride 8, as the last stage would be 2 by 2."""
    config = resnet()
    config.out_features = ["stage2"]
    return config


def detr_sizes() -> dict[str, Any]:
    return {
        "encoder_layers": 1,
        "decoder_layers": LAYERS,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "num_queries": QUERIES,
        "dropout": 0.0,
        "auxiliary_loss": True,
        "num_labels": CLASSES,
    }


def deformable_detr(*, two_stage: bool = False, **more: Any) -> Any:
    config = hf.DeformableDetrConfig(
        backbone_config=resnet(),
        d_model=32,
        num_feature_levels=3,
        two_stage=two_stage,
        two_stage_num_proposals=QUERIES,
        with_box_refine=two_stage,
        **detr_sizes() | more,
    )
    return hf.DeformableDetrForObjectDetection(config)


def two_stage_deformable_detr() -> Any:
    return deformable_detr(two_stage=True)


# init_std is 0.3: at 0.02 the queries of these two models are nearly equal, and hundreds of steps only separate them.
def conditional_detr() -> Any:
    config = hf.ConditionalDetrConfig(backbone_config=resnet_stride_8(), d_model=32, init_std=0.3, **detr_sizes())
    return hf.ConditionalDetrForObjectDetection(config)


def dab_detr() -> Any:
    config = hf.DabDetrConfig(backbone_config=resnet_stride_8(), hidden_size=32, init_std=0.3, **detr_sizes())
    return hf.DabDetrForObjectDetection(config)


def rt_sizes() -> dict[str, Any]:
    return {
        "encoder_in_channels": [16, 16, 16],
        "encoder_hidden_dim": 32,
        "decoder_in_channels": [32, 32, 32],
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": LAYERS,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "num_queries": QUERIES,
        "num_denoising": 8,
        "num_labels": CLASSES,
        "freeze_backbone_batch_norms": False,
    }


def rt_resnet() -> Any:
    return hf.RTDetrResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )


def hgnet() -> Any:
    return hf.HGNetV2Config(
        embedding_size=8,
        hidden_sizes=[8, 16, 16, 16],
        depths=[1, 1, 1, 1],
        stem_channels=[3, 8, 8],
        stage_in_channels=[8, 8, 16, 16],
        stage_mid_channels=[8, 8, 8, 8],
        stage_out_channels=[8, 16, 16, 16],
        stage_num_blocks=[1, 1, 1, 1],
        stage_numb_of_layers=[1, 1, 1, 1],
        stage_light_block=[False, False, False, False],
        stage_kernel_size=[3, 3, 3, 3],
        out_features=["stage2", "stage3", "stage4"],
    )


def rt_detr(**more: Any) -> Any:
    return hf.RTDetrForObjectDetection(hf.RTDetrConfig(backbone_config=rt_resnet(), **rt_sizes() | more))


def rt_detr_v2() -> Any:
    return hf.RTDetrV2ForObjectDetection(hf.RTDetrV2Config(backbone_config=rt_resnet(), **rt_sizes()))


def d_fine() -> Any:
    return hf.DFineForObjectDetection(hf.DFineConfig(backbone_config=hgnet(), hidden_expansion=0.5, **rt_sizes()))


def deimv2() -> Any:
    return hf.Deimv2ForObjectDetection(hf.Deimv2Config(backbone_config=hgnet(), hidden_expansion=0.5, **rt_sizes()))


def grouped_sizes() -> dict[str, Any]:
    return {
        "d_model": 32,
        "decoder_layers": LAYERS,
        "decoder_ffn_dim": 64,
        "decoder_self_attention_heads": 2,
        "decoder_cross_attention_heads": 2,
        "num_queries": QUERIES,
        "group_detr": 3,
        "dropout": 0.0,
        "num_labels": CLASSES,
        "c2f_num_blocks": 1,
    }


def lw_detr() -> Any:
    backbone = hf.LwDetrViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        mlp_ratio=2,
        image_size=SIDE,
        pretrain_image_size=SIDE,
        patch_size=8,
        num_windows=4,
        window_block_indices=[0],
        out_features=["stage1", "stage2"],
    )
    config = hf.LwDetrConfig(backbone_config=backbone, projector_scale_factors=[1.0], **grouped_sizes())
    return hf.LwDetrForObjectDetection(config)


def rf_detr() -> Any:
    backbone = hf.RfDetrDinov2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        mlp_ratio=2,
        image_size=SIDE,
        patch_size=8,
        num_windows=2,
        out_features=["stage1", "stage2"],
    )
    return hf.RfDetrForObjectDetection(hf.RfDetrConfig(backbone_config=backbone, **grouped_sizes()))


# Per model: its constructor, and the number of rankings per training step. Each decoder layer is one ranking, and so
# are the encoder's proposals; denoising queries add one ranking per layer. D-FINE and DEIMv2 make one more prediction
# before their first layer.
MODELS: dict[str, tuple[Callable[[], Any], int]] = {
    "deformable_detr": (deformable_detr, LAYERS),
    "two_stage_deformable_detr": (two_stage_deformable_detr, LAYERS + 1),
    "conditional_detr": (conditional_detr, LAYERS),
    "dab_detr": (dab_detr, LAYERS),
    "rt_detr": (rt_detr, LAYERS + 1 + LAYERS),
    "rt_detr_v2": (rt_detr_v2, LAYERS + 1 + LAYERS),
    "d_fine": (d_fine, 1 + LAYERS + 1 + 1 + LAYERS),
    "deimv2": (deimv2, 1 + LAYERS + 1 + 1 + LAYERS),
    "lw_detr": (lw_detr, LAYERS + 1),
    "rf_detr": (rf_detr, LAYERS + 1),
}


def make(name: str) -> Any:
    """Return the model of this name, with the same weights in every call."""
    torch.manual_seed(0)
    return MODELS[name][0]()


def batch() -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Return two images of bright squares on noise: the first has two objects, the second one."""
    images = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0)) * 0.1
    labels = []
    for image, squares in zip(images, ([(0.3, 0.3, 0.3, 0), (0.7, 0.6, 0.4, 1)], [(0.5, 0.5, 0.5, 2)]), strict=True):
        for x, y, size, label in squares:
            left, top, right, bottom = (int((centre + sign * size / 2) * SIDE) for sign in (-1, 1) for centre in (x, y))
            image[label, top:bottom, left:right] += 2
        boxes = torch.tensor([[x, y, size, size] for x, y, size, _ in squares])
        labels.append({"class_labels": torch.tensor([label for *_, label in squares]), "boxes": boxes})
    return images, labels


def empty_batch() -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Return the same images without objects."""
    images, labels = batch()
    empty = {"class_labels": torch.zeros(0, dtype=torch.int64), "boxes": torch.zeros(0, 4)}
    return images, [dict(empty) for _ in labels]
