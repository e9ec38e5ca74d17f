"""Tables from MMDetection's tensor names to ours."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from bucketrank.weights.tensor_table import Row, Rows, row


def original_merging(weight: Tensor) -> Tensor:
    """Reorder the channels of a patch merging from mmdet's Unfold to the order of the Swin paper's code.

    Four neighbouring tokens are merged. Unfold puts the neighbours of each channel together, as (0, 0), (0, 1), (1, 0)
    and (1, 1); the paper's code puts the channels of each neighbour together, as (0, 0), (1, 0), (0, 1) and (1, 1).
    """
    parts = weight.unflatten(-1, (-1, 4)).transpose(-1, -2)  # (..., neighbours, channels)
    merged: Tensor = parts[..., [0, 2, 1, 3], :].flatten(-2)
    return merged


def _pyramid(levels: int) -> tuple[Row, ...]:
    """Return the rows of a feature pyramid over ``levels`` maps of the backbone."""
    return (
        row(r"neck\.lateral_convs\.(\d)\.conv\.$", r"neck.pyramid.inner_blocks.\1.0.$"),
        row(rf"neck\.fpn_convs\.([0-{levels - 1}])\.conv\.$", r"neck.pyramid.layer_blocks.\1.0.$"),
        *(
            row(rf"neck\.fpn_convs\.{levels + extra}\.conv\.$", rf"neck.pyramid.extra_blocks.p{6 + extra}.$")
            for extra in range(2)
        ),
    )


def _dense(theirs: str, ours: str, prefix: str) -> tuple[Row, ...]:
    return (
        row(rf"{theirs}\.cls_convs\.(\d)\.conv\.$", rf"{ours}.class_tower.\1.0.$"),
        row(rf"{theirs}\.reg_convs\.(\d)\.conv\.$", rf"{ours}.box_tower.\1.0.$"),
        row(rf"{theirs}\.cls_convs\.(\d)\.gn\.$", rf"{ours}.class_tower.\1.1.$"),
        row(rf"{theirs}\.reg_convs\.(\d)\.gn\.$", rf"{ours}.box_tower.\1.1.$"),
        row(rf"{theirs}\.{prefix}_cls\.$", rf"{ours}.classes.$", rows="anchor_classes"),
        row(rf"{theirs}\.{prefix}_reg\.$", rf"{ours}.boxes.$", rows="deltas" if prefix == "retina" else ""),
        row(rf"{theirs}\.{prefix}_centerness\.$", rf"{ours}.quality.$", rows="quality"),
        row(rf"{theirs}\.scales\.(\d)\.scale", rf"{ours}.scales[\1]"),
    )


def _rpn(ours: str, *, rows: Rows = "deltas") -> tuple[Row, ...]:
    return (
        row(r"rpn_head\.rpn_conv\.$", rf"{ours}.head.conv.0.0.$"),
        row(r"rpn_head\.rpn_cls\.$", rf"{ours}.head.cls_logits.$"),
        row(r"rpn_head\.rpn_reg\.$", rf"{ours}.head.bbox_pred.$", rows=rows),
    )


def _box_head(theirs: str, ours: str) -> tuple[Row, ...]:
    return (
        row(rf"{theirs}\.shared_fcs\.0\.$", rf"{ours}.layers.fc6.$"),
        row(rf"{theirs}\.shared_fcs\.1\.$", rf"{ours}.layers.fc7.$"),
        row(rf"{theirs}\.fc_cls\.$", rf"{ours}.classes.$", rows="classes"),
        row(rf"{theirs}\.fc_reg\.$", rf"{ours}.boxes.$", rows="class_boxes"),
    )


# Tensors that follow from the architecture: which pairs of tokens share a bias, and the normalisation of images.
DERIVED = row(r"backbone\..+\.relative_position_index|data_preprocessor\.(?:mean|std)")
RESNET = (
    DERIVED,
    row(r"backbone\.(.+)\.conv_offset\.$", r"backbone.body.\1.predictor.$"),
    row(r"backbone\.((?:conv1|bn1|layer[1-4])\..+)", r"backbone.body.\1"),
)
BLOCK = r"backbone.body.swin.encoder.layers.\1.blocks.\2"


def _swin(
    block: str, attention: str, mlp: tuple[str, str], projection: str, change: Callable[[Tensor], Tensor] | None
) -> tuple[Row, ...]:
    """Return the rows of a Swin: ``block`` and the other arguments are its published names."""
    merging = block.partition(r"\.blocks")[0]
    ours = r"backbone.body.swin.encoder.layers.\1.downsample"
    return (
        DERIVED,
        row(rf"backbone\.patch_embed\.{projection}\.$", r"backbone.body.swin.embeddings.patch_embeddings.projection.$"),
        row(r"backbone\.patch_embed\.norm\.$", r"backbone.body.swin.embeddings.norm.$"),
        row(rf"{block}\.norm1\.$", rf"{BLOCK}.layernorm_before.$"),
        row(rf"{block}\.norm2\.$", rf"{BLOCK}.layernorm_after.$"),
        row(rf"{block}\.{attention}\.qkv\.$", *(rf"{BLOCK}.attention.{part}_proj.$" for part in "qkv")),
        row(rf"{block}\.{attention}\.proj\.$", rf"{BLOCK}.attention.o_proj.$"),
        row(
            rf"{block}\.{attention}\.(relative_position_bias_table)",
            rf"{BLOCK}.attention.relative_position_bias.relative_position_bias_table",
        ),
        row(rf"{block}\.{mlp[0]}\.$", rf"{BLOCK}.mlp.fc1.$"),
        row(rf"{block}\.{mlp[1]}\.$", rf"{BLOCK}.mlp.fc2.$"),
        row(rf"{merging}\.downsample\.(reduction|norm)\.$", rf"{ours}.\2.$", change=change),
        *(row(rf"backbone\.norm{i}\.$", rf"backbone.body.hidden_states_norms.stage{i + 1}.$") for i in range(4)),
    )


# The layout of the Swin paper's code, which Co-DETR uses, and that of MMDetection.
SWIN = _swin(r"backbone\.layers\.(\d)\.blocks\.(\d+)", "attn", (r"mlp\.fc1", r"mlp\.fc2"), "proj", None)
MMDET_SWIN = _swin(
    r"backbone\.stages\.(\d)\.blocks\.(\d+)",
    r"attn\.w_msa",
    (r"ffn\.layers\.0\.0", r"ffn\.layers\.1"),
    "projection",
    original_merging,
)
# Norms of a Swin that no neck reads: after the last block, and after the finest map. Checkpoints have none.
LAST_NORM = r"backbone\.body\.swin\.layernorm\.(?:weight|bias)"
UNUSED = LAST_NORM + r"|backbone\.body\.hidden_states_norms\.stage1\.(?:weight|bias)"

T = r"query_head\.transformer"
ATTENTION = r"((?:sampling_offsets|attention_weights|value_proj|output_proj)\.(?:weight|bias))"
HEADS = ("faster_rcnn", "atss")
CO_DETR = (  # and Co-DINO
    row(r"neck\.convs\.(\d)\.conv\.weight", r"neck.levels.\1.0.weight"),
    row(r"neck\.convs\.(\d)\.gn\.$", r"neck.levels.\1.1.$"),
    row(r"neck\.extra_convs\.0\.conv\.weight", r"neck.top.0.weight"),
    row(r"neck\.extra_convs\.0\.gn\.$", r"neck.top.1.$"),
    row(rf"{T}\.level_embeds", r"encoder.level_positions"),
    row(rf"{T}\.encoder\.layers\.(\d)\.attentions\.0\.{ATTENTION}", r"encoder.layers.\1.attention.\2"),
    row(rf"{T}\.encoder\.layers\.(\d)\.norms\.0\.$", r"encoder.layers.\1.norm.$"),
    row(rf"{T}\.encoder\.layers\.(\d)\.norms\.1\.$", r"encoder.layers.\1.feedforward.norm.$"),
    row(rf"{T}\.(encoder|decoder)\.layers\.(\d)\.ffns\.0\.layers\.0\.0\.$", r"\1.layers.\2.feedforward.layers.0.$"),
    row(rf"{T}\.(encoder|decoder)\.layers\.(\d)\.ffns\.0\.layers\.1\.$", r"\1.layers.\2.feedforward.layers.3.$"),
    row(rf"{T}\.decoder\.layers\.(\d)\.attentions\.0\.attn\.(.+)", r"decoder.layers.\1.self_attention.\2"),
    row(rf"{T}\.decoder\.layers\.(\d)\.attentions\.1\.{ATTENTION}", r"decoder.layers.\1.attention.\2"),
    row(rf"{T}\.decoder\.layers\.(\d)\.norms\.0\.$", r"decoder.layers.\1.self_norm.$"),
    row(rf"{T}\.decoder\.layers\.(\d)\.norms\.1\.$", r"decoder.layers.\1.norm.$"),
    row(rf"{T}\.decoder\.layers\.(\d)\.norms\.2\.$", r"decoder.layers.\1.feedforward.norm.$"),
    row(rf"{T}\.enc_output\.$", r"proposer.project.$"),
    row(rf"{T}\.enc_output_norm\.$", r"proposer.norm.$"),
    row(rf"{T}\.pos_trans\.$", r"selected.encoding.project.$"),
    row(rf"{T}\.pos_trans_norm\.$", r"selected.encoding.norm.$"),
    row(rf"query_head\.query_embedding\.weight|{T}\.query_embed\.weight", r"selected.content"),
    row(rf"{T}\.decoder\.ref_point_head\.([02])\.$", r"decoder.positions.\1.$"),
    row(rf"{T}\.decoder\.norm\.$", r"decoder.norm.$"),
    row(r"query_head\.dn_generator\.label_embedding\.weight", r"denoising.labels.weight", rows="class_rows"),
    row(
        rf"{T}\.head_pos_embed\.weight",
        *(f"auxiliary_queries.{head}.head" for head in HEADS),
        rows="marks",
        change=Tensor.flatten,
    ),
    *(
        row(rf"{T}\.{theirs}\.{number}\.$", rf"auxiliary_queries.{head}.{ours}.$")
        for number, head in enumerate(HEADS)
        for theirs, ours in (
            ("aux_pos_trans", "encoding.project"),
            ("aux_pos_trans_norm", "encoding.norm"),
            ("pos_feats_trans", "project"),
            ("pos_feats_norm", "norm"),
        )
    ),
    row(r"query_head\.downsample\.([01])\.$", r"fifth.\1.$"),
    *_rpn("auxiliary.faster_rcnn.rpn", rows=""),
    *_box_head(r"roi_head\.0\.bbox_head", "auxiliary.faster_rcnn.roi"),
    *_dense(r"bbox_head\.0", "auxiliary.atss.head", "atss"),
)
RCNN = (*_pyramid(4), *_rpn("rpn"))
HEAD_ROWS: dict[str, tuple[Row, ...]] = {  # keys are our detector names
    "atss": (*_pyramid(3), *_dense("bbox_head", "head", "atss")),
    "paa": (*_pyramid(3), *_dense("bbox_head", "head", "atss")),
    "retinanet": (*_pyramid(3), *_dense("bbox_head", "head", "retina")),
    "faster_rcnn": (*RCNN, *_box_head(r"roi_head\.bbox_head", "box_head")),
    "mask_rcnn": (
        *RCNN,
        *_box_head(r"roi_head\.bbox_head", "box_head"),
        row(r"roi_head\.mask_head\.convs\.(\d)\.conv\.$", r"mask_head.0.\1.0.$"),
        row(r"roi_head\.mask_head\.upsample\.$", r"mask_head.1.conv5_mask.$"),
        row(r"roi_head\.mask_head\.conv_logits\.$", r"mask_head.1.mask_fcn_logits.$", rows="class_rows"),
    ),
    "cascade_rcnn": (
        *RCNN,
        *(each for stage in range(3) for each in _box_head(rf"roi_head\.bbox_head\.{stage}", f"stages.{stage}")),
    ),
}


def co_detr_rows(decoder_layers: int, *, dino: bool) -> tuple[Row, ...]:
    """Return the rows of Co-DETR or Co-DINO; the branches after the decoder's are those of the proposals."""
    layers = range(decoder_layers)
    proposer: Rows = "class_rows" if dino else "proposer_classes"
    return (
        *CO_DETR,
        *(row(rf"query_head\.cls_branches\.{i}\.$", f"decoder.classes.{i}.$", rows="class_rows") for i in layers),
        *(row(rf"query_head\.reg_branches\.{i}\.(\d)\.$", rf"decoder.boxes.{i}.\1.$") for i in layers),
        row(rf"query_head\.cls_branches\.{decoder_layers}\.$", r"proposer.classes.$", rows=proposer),
        row(rf"query_head\.reg_branches\.{decoder_layers}\.(\d)\.$", r"proposer.boxes.\1.$"),
    )
