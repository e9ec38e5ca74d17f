"""The Triton kernels compile for every target that we support, and no NVIDIA target spills registers. Needs no GPU."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET", "0") == "1":
    pytest.skip("the interpreter has no compiler", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from bucketrank.losses.triton import ranking as steps  # noqa: E402

pytestmark = pytest.mark.slow

TARGETS = {
    **{f"sm_{capability}": ("cuda", capability, 32) for capability in (70, 75, 80, 86, 89, 90, 100, 103, 120)},
    **{name: ("hip", name, 64) for name in ("gfx908", "gfx90a", "gfx942", "gfx950")},
    **{name: ("hip", name, 32) for name in ("gfx1100", "gfx1201")},
}
POINTERS = {
    **dict.fromkeys(["keys", "index", "order", "earlier_order", "entries", "starts", "buckets"], "*i64"),
    **dict.fromkeys(
        ["ramps", "ranks", "shares", "seconds", "errors", "weights", "own", "second_own", "factors", "sorting_errors"],
        "*fp64",
    ),
    **dict.fromkeys(
        ["owners", "lower_edges", "upper_edges", "last_tied", "slots", "ranking_of", "first_positives"], "*i32"
    ),
    **dict.fromkeys(["broken", "positive_count"], "*i32"),
    **dict.fromkeys(["logits", "targets", "localisation", "scores", "labels", "bounds", "table", "gradient"], "*fp32"),
    **dict.fromkeys(["upstream", "first_upstream", "second_upstream", "first_values", "second_values"], "*fp32"),
    "localisation_gradient": "*fp32",
    "unit": "fp32",
    "delta_bits": "i64",
}
# The constants of each kernel: those of the largest variant.
KERNELS: dict[str, dict[str, Any]] = {
    "write_keys": {"SINGLE": False, "CONTENT": "both", "BLOCK": steps.POSITIVES},
    "gather_positives": {"TWO_ORDERS": False, "LOCALISED": True, "SHIFT": 32, "BLOCK": steps.POSITIVES},
    "place_edges": {"SMOOTH": True, "BLOCK": steps.POSITIVES},
    "fill_buckets": {"SINGLE": False, "SMOOTH": True, "CAPACITY": True, "WIDE": False, "BLOCK": steps.LOGITS},
    "compare_positives": {"LOSS": "rs", "SMOOTH": True, "WIDE": False, "ROWS": steps.ROWS, "COLUMNS": steps.COLUMNS},
    "scan_buckets": {"SMOOTH": True, "TILE": steps.TILE},
    "compute_terms": {"LOSS": "interpolated_ap", "SMOOTH": True, "CAPACITY": True, "TILE": steps.TILE},
    "write_table": {"SMOOTH": True, "TILE": steps.TILE},
    "demote_positives": {"SMOOTH": True, "WIDE": False, "ROWS": steps.ROWS, "COLUMNS": steps.COLUMNS},
    "write_gradient": {"SINGLE": False, "SMOOTH": True, "TRAINED": True, "WIDE": False, "BLOCK": steps.LOGITS},
    "positive_gradients": {"FIRST": True, "SECOND": True, "LOCALISED": True, "BLOCK": steps.POSITIVES},
}
# Other variants, compiled for one target only.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("fill_buckets", {"SINGLE": True, "CAPACITY": False}),
    ("fill_buckets", {"SMOOTH": False}),
    ("write_gradient", {"SINGLE": True}),
    ("write_gradient", {"SMOOTH": False}),
    ("write_gradient", {"TRAINED": False}),
    ("compare_positives", {"LOSS": "ap"}),
    ("compare_positives", {"LOSS": "alrp"}),
    ("compare_positives", {"SMOOTH": False}),
    ("compare_positives", {"LOSS": "alrp", "SMOOTH": False}),
    ("demote_positives", {"SMOOTH": False}),
    ("compute_terms", {"LOSS": "ap"}),
    ("compute_terms", {"LOSS": "rs"}),
    ("compute_terms", {"LOSS": "alrp", "CAPACITY": False}),
    ("compute_terms", {"LOSS": "ap", "SMOOTH": False}),
    ("scan_buckets", {"SMOOTH": False}),
    ("write_table", {"SMOOTH": False}),
    ("place_edges", {"SMOOTH": False}),
    ("positive_gradients", {"LOCALISED": False}),
    ("positive_gradients", {"SECOND": False}),
    ("write_keys", {"SINGLE": True}),
]
# float64 logits: every kernel, with float64 ramps.
WIDE: list[tuple[str, dict[str, Any]]] = [
    ("write_keys", {"CONTENT": "score"}),
    ("write_keys", {"CONTENT": "ranking"}),
    ("gather_positives", {"TWO_ORDERS": True, "SHIFT": 0}),
    *((name, {"WIDE": True}) for name in ("fill_buckets", "compare_positives", "demote_positives", "write_gradient")),
    ("compare_positives", {"WIDE": True, "LOSS": "alrp"}),
    ("place_edges", {}),
    ("scan_buckets", {}),
    ("write_table", {}),
    ("compute_terms", {"LOSS": "rs"}),
    ("positive_gradients", {}),
]


def _compile(name: str, target: str, changes: dict[str, Any], dtype: str = "fp32") -> Any:
    kernel = getattr(steps, name)
    constants = KERNELS[name] | changes
    signature = {
        argument: "constexpr" if argument in constants else POINTERS.get(argument, "i32").replace("*fp32", f"*{dtype}")
        for argument in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": 4, "enable_fp_fusion": False}
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
