"""Decode the PTX of a kernel, and execute it on host memory with ``interpreter.cpp``."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("interpreter.cpp")
BUILD = Path(__file__).parents[2] / "build"
MAX_RESULTS, MAX_OPERANDS = 8, 10

SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
COMPARISONS = {"eq": 0, "ne": 1, "lt": 2, "le": 3, "gt": 4, "ge": 5, "lo": 2, "ls": 3, "hi": 4, "hs": 5}
COMPARISONS |= {"equ": 6, "neu": 7, "ltu": 8, "leu": 9, "gtu": 10, "geu": 11, "nan": 12, "num": 13}
SPECIAL = {"%tid.x": "thread_id", "%ctaid.x": "block_id", "%nctaid.x": "block_count"}

# Names in the interpreter for names in PTX, for instructions of which every lane computes one result.
_INTEGERS = {
    **{f"add.{sign}{bits}": f"add_{bits}" for sign in "su" for bits in ("16", "32", "64")},
    **{f"sub.{sign}{bits}": f"sub_{bits}" for sign in "su" for bits in ("16", "32", "64")},
    **{f"mul.lo.{sign}{bits}": f"mul_{bits}" for sign in "su" for bits in ("32", "64")},
    **{f"mul.wide.{sign}32": f"mul_wide_{sign}32" for sign in "su"},
    **{f"mul.hi.{sign}32": f"mul_hi_{sign}32" for sign in "su"},
    **{f"mad.lo.{sign}32": "mad_32" for sign in "su"},
    **{
        f"{name}.{sign}{bits}": f"{name}_{sign}{bits}"
        for name in ("div", "rem")
        for sign in "su"
        for bits in ("32", "64")
    },
    **{f"neg.s{bits}": f"neg_{bits}" for bits in ("32", "64")},
    **{f"not.b{bits}": f"not_{bits}" for bits in ("16", "32", "64")},
    **{f"{name}.{kind}": f"{name}_64" for name in ("and", "or", "xor") for kind in ("b16", "b32", "b64", "pred")},
    **{f"shl.b{bits}": f"shl_{bits}" for bits in ("16", "32", "64")},
    **{f"shr.{sign}{bits}": f"shr_{sign}{bits}" for sign in "su" for bits in ("16", "32", "64")},
    **{f"{name}.{kind}": f"{name}_{kind}" for name in ("min", "max") for kind in ("s32", "u32", "s64")},
    **{f"selp.{kind}{bits}": "select" for kind in "busf" for bits in ("16", "32", "64")},
    "not.pred": "not_pred",
    "bfe.u32": "bfe_u32",
    "abs.s32": "abs_s32",
    "popc.b32": "popc_32",
    "prmt.b32": "permute",
}
_FLOATS = {
    **{
        f"{name}{rn}.{kind}": f"{name}_{kind}"
        for name in ("add", "sub", "mul", "div")
        for rn in ("", ".rn")
        for kind in ("f32", "f64")
    },
    **{f"{name}.{kind}": f"{name}_{kind}" for name in ("min", "max", "abs", "neg") for kind in ("f32", "f64")},
    **{f"fma.rn.{kind}": f"fma_{kind}" for kind in ("f32", "f64", "bf16")},
    "div.rn.ftz.f32": "div_ftz_f32",
    "abs.f16": "abs_f16",
    "abs.bf16": "abs_bf16",
    "abs.f16x2": "abs_f16x2",
    "neg.f16": "neg_f16",
    **{f"{name}{rn}.f16": f"{name}_f16" for name in ("add", "mul") for rn in ("", ".rn")},
}
_CONVERSIONS = {
    **{
        f"cvt.{sign}{to}.u{bits}": f"zero_extend_{bits}"
        for sign in "su"
        for to in ("16", "32", "64")
        for bits in ("8", "16", "32")
        if int(bits) < int(to)
    },
    **{
        f"cvt.{sign}{to}.s{bits}": f"sign_extend_{bits}"
        for sign in "su"
        for to in ("16", "32", "64")
        for bits in ("8", "16", "32")
        if int(bits) < int(to)
    },
    **{
        f"cvt.{sign}{bits}.{other}{wide}": f"zero_extend_{bits}"
        for sign in "su"
        for other in "su"
        for bits in ("8", "16", "32")
        for wide in ("16", "32", "64")
        if int(bits) < int(wide)
    },
    "cvt.f64.f32": "f64_from_f32",
    "cvt.rn.f32.f64": "f32_from_f64",
    **{f"cvt.rn.f32.{kind}": f"f32_from_{kind}" for kind in ("s32", "u32", "s64")},
    **{f"cvt.rn.f64.{kind}": f"f64_from_{kind}" for kind in ("s32", "u32", "s64")},
    **{f"cvt.rzi.{to}.{kind}": f"{to}_from_{kind}" for to in ("s32", "s64") for kind in ("f32", "f64")},
    **{f"cvt.f32.{half}": f"f32_from_{half}" for half in ("f16", "bf16")},
    **{f"cvt.rn.{half}.f32": f"{half}_from_f32" for half in ("f16", "bf16", "f16x2", "bf16x2")},
}
LANE_INSTRUCTIONS = _INTEGERS | _FLOATS | _CONVERSIONS
REDUCTIONS = {"add.s32": "reduce_add", "add.u32": "reduce_add", "or.b32": "reduce_or", "and.b32": "reduce_and"}
REDUCTIONS |= {f"{name}.{sign}32": f"reduce_{name}_{sign}" for name in ("max", "min") for sign in "su"}
ATOMICS = {"add": "atomic_add", "max": "atomic_max", "min": "atomic_min", "or": "atomic_or", "exch": "atomic_exchange"}


class KernelError(RuntimeError):
    """A kernel did something that no GPU would do reliably."""


class _Instruction(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("operation", "guard", "guard_value", "results", "operands")),
        ("result", ctypes.c_int32 * MAX_RESULTS),
        ("operand", ctypes.c_int32 * MAX_OPERANDS),
        *((name, ctypes.c_int32) for name in ("width", "count", "line")),
        ("immediate", ctypes.c_int64),
    ]


class _Array(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start", "bytes", "item")),
        *((name, ctypes.c_int64) for name in ("loaded", "stored")),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_void_p),
        ("instructions", ctypes.c_int64),
        ("constants", ctypes.c_void_p),
        ("constant_count", ctypes.c_int64),
        ("registers", ctypes.c_int64),
        ("parameters", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("blocks", "warps", "shared_bytes")),
        ("seed", ctypes.c_uint64),
        ("resident", ctypes.c_int64),
        ("arrays", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("array_count", "steps", "atomics", "races")),
        ("message", ctypes.c_char * 512),
    ]


def has_compiler() -> bool:
    """Whether this machine can compile the interpreter."""
    return shutil.which("g++") is not None


@cache
def _library() -> Any:
    """Compile the interpreter once per version of its source."""
    text = SOURCE.read_bytes()
    built = BUILD / f"ptx-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not built.exists():
        BUILD.mkdir(exist_ok=True)
        handle, unfinished = tempfile.mkstemp(suffix=".so", dir=BUILD)
        os.close(handle)
        # No fused multiply-add: the kernels are compiled without it.
        command = ["g++", "-O2", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", str(SOURCE), "-o", unfinished]
        subprocess.run(command, check=True)
        Path(unfinished).replace(built)
    library = ctypes.CDLL(str(built))
    library.operation_name.restype = ctypes.c_char_p
    return library


@cache
def _operations() -> dict[str, int]:
    numbers: dict[str, int] = {}
    while (name := _library().operation_name(len(numbers))) is not None:
        numbers[name.decode()] = len(numbers)
    return numbers


class Execution(NamedTuple):
    """What one launch did: executed instructions per warp, atomic operations, and bytes moved per argument."""

    steps: int
    atomics: int
    loaded: dict[str, int]
    stored: dict[str, int]


class Program:
    """A kernel, decoded."""

    def __init__(self, ptx: str, *, shared_bytes: int, warps: int) -> None:
        self.shared_bytes, self.warps = shared_bytes, warps
        head, body = ptx[ptx.index(".visible .entry") :].split("{", 1)
        self.parameters = re.findall(r"\.param\s+\.(\w+)(?:\s+\.ptr[^,)]*?)?\s+(\w+_param_\d+)", head)
        decoder = _Decoder([name for _, name in self.parameters])
        first_line = ptx[: ptx.index(body)].count("\n") + 1
        decoder.decode(body.split("$L__func_end0")[0], first_line)
        self.code = (_Instruction * len(decoder.code))(*decoder.code)
        self.registers = len(decoder.registers)
        self.constants = list(decoder.constants)
        self.places = decoder.places

    def run(self, blocks: int, arguments: dict[str, Any], *, seed: int, resident: int = 4) -> Execution:
        """Execute ``blocks`` blocks; a tensor among the arguments is an array that the kernel may access."""
        words = [_word(value, kind) for value, (kind, _) in zip(arguments.values(), self.parameters, strict=False)]
        words += [0] * (len(self.parameters) - len(words))  # scratch memory, which our kernels do not use
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor) and value.numel()}
        arrays = (_Array * max(1, len(tensors)))(*(_Array(*_extent(tensor)) for tensor in tensors.values()))
        parameters = (ctypes.c_uint64 * max(1, len(words)))(*words)
        constants = (ctypes.c_uint64 * max(1, len(self.constants)))(*self.constants)
        launch = _Launch(
            code=ctypes.addressof(self.code),
            instructions=len(self.code),
            constants=ctypes.addressof(constants),
            constant_count=len(self.constants),
            # The constants follow the registers.
            registers=self.registers,
            parameters=ctypes.addressof(parameters),
            blocks=blocks,
            warps=self.warps,
            shared_bytes=self.shared_bytes,
            seed=seed,
            resident=resident,
            arrays=ctypes.addressof(arrays),
            array_count=len(tensors),
        )
        if _library().run_kernel(ctypes.byref(launch)) or launch.races:
            message = launch.message.decode()
            line = int(message.rsplit("line ", 1)[1]) if "line " in message else 0
            raise KernelError(f"{message} ({self.places.get(line, 'unknown place')})")
        loaded = {name: int(array.loaded) for name, array in zip(tensors, arrays, strict=False)}
        stored = {name: int(array.stored) for name, array in zip(tensors, arrays, strict=False)}
        return Execution(launch.steps, launch.atomics, loaded, stored)


def _extent(tensor: Tensor) -> tuple[int, int, int]:
    """Return the address of a tensor, its bytes, and the bytes of an entry."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size(), tensor.element_size()


def _word(value: Any, kind: str) -> int:
    """Return an argument as the 64 bits of a parameter."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, float):
        wide = torch.tensor(value, dtype=torch.float64 if kind.endswith("64") else torch.float32, device="cpu")
        return int(wide.view(torch.int64 if kind.endswith("64") else torch.int32)) & 0xFFFFFFFFFFFFFFFF
    return int(value or 0) & 0xFFFFFFFFFFFFFFFF


class _Decoder:
    """Turns the body of a kernel into instructions, with numbers for registers, constants and labels."""

    def __init__(self, parameters: Sequence[str]) -> None:
        self.parameters = {name: number for number, name in enumerate(parameters)}
        self.registers: dict[str, int] = {}
        self.constants: dict[int, int] = {}
        self.code: list[_Instruction] = []
        self.places: dict[int, str] = {}  # line of the PTX -> line of Python
        self.labels: dict[str, int] = {}
        self.line = 0

    def decode(self, body: str, first_line: int) -> None:
        jumps: list[tuple[int, str]] = []
        place = "unknown place"
        for number, text in enumerate(body.split("\n"), first_line):
            self.line = number
            if text.lstrip().startswith(".loc") and "// " in text:
                place = text.rsplit("// ", 1)[1]
            self.places[number] = place
            for statement in _statements(text):
                if statement.endswith(":"):
                    self.labels[statement[:-1]] = len(self.code)
                elif (target := self._add(statement)) is not None:
                    jumps.append((len(self.code) - 1, target))
        self._emit("ret")
        for position, label in jumps:
            self.code[position].immediate = self.labels[label]
        # Constants are the registers after all others.
        for instruction in self.code:
            for k in range(instruction.operands):
                if instruction.operand[k] < 0:
                    instruction.operand[k] = len(self.registers) - 1 - instruction.operand[k]

    def _operand(self, text: str) -> int:
        """Return the number of a register, or -1 - k for constant k."""
        if text.startswith("%"):
            return self.registers.setdefault(text, len(self.registers))
        if text.startswith(("0f", "0d")):
            value = int(text[2:], 16)
        elif text == "global_smem":
            value = 0
        else:
            value = int(text.rstrip("U"), 0)
        return -1 - self.constants.setdefault(value & 0xFFFFFFFFFFFFFFFF, len(self.constants))

    def _emit(self, operation: str, results: Iterable[str] = (), operands: Iterable[str] = (), **fields: int) -> None:
        targets = [self._operand(text if text != "_" else "%unused") for text in results]
        sources = [self._operand(text) for text in operands]
        instruction = _Instruction(
            operation=_operations()[operation],
            guard=-1,
            results=len(targets),
            operands=len(sources),
            line=self.line,
            **fields,
        )
        instruction.result[: len(targets)] = targets
        instruction.operand[: len(sources)] = sources
        self.code.append(instruction)

    def _add(self, statement: str) -> str | None:
        """Decode one statement; return the label that it jumps to, if any."""
        guard = re.match(r"@(!?)(%\w+)\s+", statement)
        name, _, rest = statement[guard.end() if guard else 0 :].partition(" ")
        arguments = [text.strip() for text in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+", rest) if text.strip()]
        target = self._decode(name.strip(), arguments, statement)
        if guard:
            self.code[-1].guard = self._operand(guard[2])
            self.code[-1].guard_value = 0 if guard[1] else 1
        return target

    def _decode(self, name: str, arguments: list[str], statement: str) -> str | None:
        base, *parts = name.replace("::cta", "").split(".")
        kind = parts[-1] if parts else ""
        if name in LANE_INSTRUCTIONS:
            self._emit(LANE_INSTRUCTIONS[name], arguments[:1], arguments[1:])
        elif base == "ret":
            self._emit("ret")
        elif base == "bra":
            self._emit("branch")
            return arguments[0]
        elif base in ("bar", "barrier"):
            self._emit("nop" if "warp" in parts else "barrier")
        elif base in ("ld", "st"):
            self._decode_access(base, parts, arguments)
        elif base in ("red", "atom"):
            operation = next(ATOMICS[part] for part in parts if part in ATOMICS)
            register, immediate = _address(arguments[1] if base == "atom" else arguments[0])
            results = arguments[:1] if base == "atom" else []
            self._emit(operation, results, [register, arguments[-1]], width=_size(kind), immediate=immediate)
        elif base == "ldmatrix":
            register, immediate = _address(arguments[1])
            count = int(next(part for part in parts if part in ("x1", "x2", "x4"))[1])
            if "trans" in parts:
                raise NotImplementedError(statement)
            self._emit("load_matrix", _vector(arguments[0]), [register], count=count, immediate=immediate)
        elif base == "mov":
            self._decode_move(kind, arguments)
        elif base == "setp":
            operation = f"compare_{kind if kind[0] in 'suf' or kind == 'bf16' else 's' + kind[1:]}"
            self._emit(operation, arguments[:1], arguments[1:], width=COMPARISONS[parts[0]])
        elif base == "mad" and parts[0] == "wide":
            self._emit(f"mul_wide_{kind}", ["%product"], arguments[1:3])
            self._emit("add_64", arguments[:1], ["%product", arguments[3]])
        elif base == "shfl":
            self._emit(f"shuffle_{parts[1]}", arguments[:1], arguments[1:4])
        elif base == "vote" and "ballot" in parts:
            self._emit("vote_ballot", arguments[:1], arguments[1:2])
        elif base == "redux":
            self._emit(REDUCTIONS[".".join(parts[1:])], arguments[:1], arguments[1:2])
        else:
            raise NotImplementedError(f"line {self.line}: {statement}")
        return None

    def _decode_access(self, base: str, parts: list[str], arguments: list[str]) -> None:
        count = next((int(part[1:]) for part in parts if re.fullmatch(r"v\d", part)), 1)
        width = _size(parts[-1])
        place, numbers = (arguments[1], arguments[0]) if base == "ld" else arguments[:2]
        if parts[0] == "param":
            self._emit("load_parameter", _vector(numbers), width=width, immediate=self.parameters[place.strip("[] ")])
            return
        register, immediate = _address(place)
        settings = {"width": width, "count": count, "immediate": immediate}
        if base == "ld":
            self._emit(f"load_{parts[0]}", _vector(numbers), [register], **settings)
        else:
            self._emit(f"store_{parts[0]}", [], [register, *_vector(numbers)], **settings)

    def _decode_move(self, kind: str, arguments: list[str]) -> None:
        target, source = arguments
        if source in SPECIAL:
            self._emit(SPECIAL[source], [target])
        elif target.startswith("{"):
            targets = _vector(target)
            self._emit(f"unpack_{int(kind[1:]) // len(targets)}", targets, [source])
        elif source.startswith("{"):
            sources = _vector(source)
            self._emit(f"pack_{int(kind[1:]) // len(sources)}", [target], sources)
        else:
            self._emit("mov", [target], [source])


def _statements(text: str) -> list[str]:
    """Return the labels and instructions on one line."""
    text = text.split("//")[0].strip()
    if re.fullmatch(r"[\w$]+:", text):
        return [text]
    # Registers that are declared inside braces have names without a percent sign.
    text = re.sub(r"\.reg\s+\.\w+\s+tmp;", "", text)
    text = re.sub(r"\btmp\b", "%tmp", text)
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    statements = (" ".join(statement.split()) for statement in text.split(";"))
    return [statement for statement in statements if statement not in ("", "{", "}") and not statement.startswith(".")]


def _vector(text: str) -> list[str]:
    return [part.strip() for part in text.strip("{} ").split(",")]


def _address(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(%?\w+)\s*(?:\+\s*(-?\d+))?", text.strip("[] "))
    if match is None:
        raise NotImplementedError(text)
    return match[1], int(match[2] or 0)


def _size(kind: str) -> int:
    return SIZES[kind.lstrip("busf")]
