"""The Triton kernels compile for every target that we support, and no NVIDIA target spills registers. Needs no GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from bucketrank.losses.triton import ranking as steps  # noqa: E402
from bucketrank.losses.triton import tree  # noqa: E402

pytestmark = pytest.mark.slow

TARGETS = {
    **{f"sm_{capability}": ("cuda", capability, 32) for capability in (70, 75, 80, 86, 89, 90, 100, 103, 120)},
    **{name: ("hip", name, 64) for name in ("gfx908", "gfx90a", "gfx942", "gfx950")},
    **{name: ("hip", name, 32) for name in ("gfx1100", "gfx1201")},
}
POINTERS = {
    **dict.fromkeys(["keys", "index", "order", "earlier_order", "starts", "buckets"], "*i64"),
    **dict.fromkeys(
        ["ramps", "ranks", "shares", "seconds", "errors", "weights", "own", "second_own", "factors", "sorting_errors"],
        "*fp64",
    ),
    **dict.fromkeys(["owners", "lower_edges", "upper_edges", "last_tied", "rows", "block_slots"], "*i32"),
    **dict.fromkeys(["first_positives", "broken", "positive_count", "counts"], "*i32"),
    **dict.fromkeys(["offsets", "fractions", "totals", "sums", "worse_counts"], "*fp64"),
    **dict.fromkeys(["level_order", "next_order", "label_ranks", "label_bounds", "left_totals", "lefts"], "*i32"),
    **dict.fromkeys(["cuts", "ends", "first_tied"], "*i32"),
    "kinds": "*i8",
    **dict.fromkeys(["logits", "gradient"], "*logit"),
    **dict.fromkeys(["targets", "localisation", "scores", "labels", "bounds", "rests", "table"], "*fp32"),
    **dict.fromkeys(["first_upstream", "second_upstream", "first_values", "second_values"], "*fp32"),
    "localisation_gradient": "*fp32",
    **dict.fromkeys(["unit", "part"], "fp32"),
    **dict.fromkeys(["delta_bits", "inverse_bits"], "i64"),
}
PAIRS = {"ROWS": steps.ROWS, "COLUMNS": steps.COLUMNS, "FLUSH": steps.FLUSH}
COPIES = {"COPIES": steps.COPIES, "BUCKETS": steps.BUCKETS}
# The constants of each kernel: those of the largest variant.
KERNELS: dict[str, dict[str, Any]] = {
    "write_keys": {"SINGLE": False, "CONTENT": "both", "BLOCK": steps.POSITIVES},
    "place_positives": {
        "SINGLE": False,
        "TWO_ORDERS": False,
        "LOCALISED": True,
        "SMOOTH": True,
        "LOGITS": steps.LOGITS,
        "BLOCK": steps.POSITIVES,
    },
    "fill_buckets": {
        "SINGLE": False,
        "SMOOTH": True,
        "CAPACITY": True,
        "WIDE": False,
        "BLOCK": steps.LOGITS,
        **COPIES,
    },
    "compare_positives": {"LOSS": "rs", "SMOOTH": True, "WIDE": False, **COPIES, **PAIRS},
    "finish_rankings": {"LOSS": "interpolated_ap", "SMOOTH": True, "CAPACITY": True, "TILE": steps.TILE},
    "demote_positives": {"SMOOTH": True, "WIDE": False, **PAIRS},
    "total_tiles": {"FIRST": 0, "LAST": 2, "BLOCK": tree.SCAN},
    "scan_tiles": {"FIRST": 0, "LAST": 2, "BLOCK": tree.SCAN},
    "sum_above": {"LOSS": "alrp", "SMOOTH": True, **COPIES, "BLOCK": tree.QUERY},
    "add_worse": {"BLOCK": tree.QUERY},
    "add_better": {"BLOCK": tree.QUERY},
    "write_gradient": {
        "SINGLE": False,
        "SMOOTH": True,
        "FIRST": True,
        "SECOND": True,
        "LOCALISED": True,
        "WIDE": False,
        "BLOCK": steps.LOGITS,
        "POSITIVES": steps.POSITIVES_OF_BLOCK,
    },
}
# Other variants, compiled for one target only.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("write_keys", {"SINGLE": True}),
    ("place_positives", {"SINGLE": True, "LOCALISED": False}),
    ("place_positives", {"SMOOTH": False}),
    ("fill_buckets", {"SINGLE": True, "CAPACITY": False}),
    ("fill_buckets", {"SMOOTH": False}),
    *(
        ("compare_positives", {"LOSS": loss, "SMOOTH": smooth})
        for loss in ("ap", "rs", "alrp")
        for smooth in (True, False)
    ),
    ("compare_positives", {"ROWS": steps.FEW_ROWS}),
    *(("finish_rankings", {"LOSS": loss}) for loss in ("ap", "rs", "alrp")),
    ("finish_rankings", {"LOSS": "ap", "SMOOTH": False, "CAPACITY": False}),
    ("demote_positives", {"SMOOTH": False}),
    ("demote_positives", {"ROWS": steps.FEW_ROWS}),
    ("scan_tiles", {"LAST": 1}),
    ("sum_above", {"LOSS": "rs"}),
    ("write_gradient", {"SINGLE": True, "LOCALISED": False}),
    ("write_gradient", {"SMOOTH": False, "SECOND": False}),
    ("write_gradient", {"FIRST": False}),
]
# float64 logits: every kernel, with float64 ramps.
WIDE: list[tuple[str, dict[str, Any]]] = [
    ("write_keys", {"CONTENT": "score"}),
    ("write_keys", {"CONTENT": "ranking"}),
    ("place_positives", {"TWO_ORDERS": True}),
    *((name, {"WIDE": True}) for name in ("fill_buckets", "write_gradient")),
    *((name, {"WIDE": True, "ROWS": steps.FEW_ROWS}) for name in ("compare_positives", "demote_positives")),
    ("compare_positives", {"WIDE": True, "ROWS": steps.FEW_ROWS, "LOSS": "alrp"}),
    ("finish_rankings", {"LOSS": "rs"}),
]
# The kernels that read logits of half precision.
HALF = ("write_keys", "place_positives", "fill_buckets", "write_gradient")


def _compile(name: str, target: str, changes: dict[str, Any], dtype: str = "fp32", logit: str | None = None) -> Any:
    kernel = getattr(tree if hasattr(tree, name) else steps, name)
    constants = KERNELS[name] | changes
    types = {"*fp32": f"*{dtype}", "*logit": f"*{logit or dtype}"}
    signature = {argument: POINTERS.get(argument, "i32") for argument in kernel.arg_names}
    signature = {argument: types.get(kind, kind) for argument, kind in signature.items()}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    warps = steps.SCAN_WARPS if name == "finish_rankings" else 4
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)


def _spilled_bytes(ptx: str, target: str, folder: Path) -> list[int]:
    """Return the bytes of spill stores and spill loads that ptxas reports."""
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    architecture = re.search(r"\.target (sm_\w+)", ptx)
    assert architecture is not None
    ptxas = _ptxas(int(target.removeprefix("sm_")))
    command = [ptxas, "-v", "--fmad=false", f"--gpu-name={architecture[1]}", str(source), "-o", "/dev/null"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.findall(r"(\d+) bytes spill", report)
    assert spills, report
    return [int(spill) for spill in spills]


def _ptxas(capability: int) -> str:
    from triton.backends.nvidia.compiler import get_ptxas

    return str(get_ptxas(capability).path)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_without_spills(name: str, target: str, tmp_path: Path) -> None:
    compiled = _compile(name, target, {})
    if target.startswith("sm_"):
        assert compiled.asm["cubin"]
        assert set(_spilled_bytes(compiled.asm["ptx"], target, tmp_path)) == {0}
    else:
        assert compiled.asm["hsaco"]
        assert re.findall(r"\.vgpr_spill_count: +(\d+)", compiled.asm["amdgcn"]) == ["0"]


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_every_variant_compiles_without_spills(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    ptx = _compile(name, "sm_80", changes).asm["ptx"]
    assert set(_spilled_bytes(ptx, "sm_80", tmp_path)) == {0}


@pytest.mark.parametrize(("name", "changes"), WIDE)
def test_float64_compiles_without_spills(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    ptx = _compile(name, "sm_80", changes, dtype="fp64").asm["ptx"]
    assert set(_spilled_bytes(ptx, "sm_80", tmp_path)) == {0}


@pytest.mark.parametrize("target", ["sm_70", "sm_75", "sm_80", "gfx90a", "gfx1100"])
@pytest.mark.parametrize("logit", ["fp16", "bf16"])
def test_half_precision_compiles(logit: str, target: str) -> None:
    for name in HALF:
        assert _compile(name, target, {}, logit=logit).asm


def test_pairs_are_compared_without_exchange() -> None:
    """The inner loops of the pair kernels hold neither shuffles nor barriers, and at most 25 instructions per pair."""
    per_thread = steps.ROWS * steps.COLUMNS // 128
    for name in ("compare_positives", "demote_positives"):
        loops = _inner_loops(_compile(name, "sm_80", {}).asm["ptx"])
        pairs = [loop for loop in loops if sum(" max.f32" in line or " selp" in line for line in loop) >= per_thread]
        assert pairs, name
        for loop in pairs:
            assert not any("shfl" in line or "bar.sync" in line for line in loop), name
            assert len(loop) <= 25 * per_thread, (name, len(loop) / per_thread)


def _inner_loops(ptx: str) -> list[list[str]]:
    """Return the instructions of each loop of the PTX that holds no other loop."""
    lines = [line.strip() for line in ptx.split("\n")]
    lines = [" " + line for line in lines if line and not line.startswith((".", "//", "mov.u", "{", "}"))]
    labels = {line.strip().split(":")[0]: k for k, line in enumerate(lines) if re.match(r" \$L\w+:", line)}
    loops = []
    for k, line in enumerate(lines):
        jump = re.search(r"bra\S*\s+(\$L\w+);", line)
        if jump and labels.get(jump[1], k) < k:
            loops.append((labels[jump[1]], k))
    inner = [(a, b) for a, b in loops if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)]
    return [[line for line in lines[a:b] if not line.startswith(" $")] for a, b in inner]
