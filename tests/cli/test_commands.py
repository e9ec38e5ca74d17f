"""The command line: quick help, and messages that name the nearest command, flag or value."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import pytest

from bucketrank import __version__
from bucketrank.cli import __main__ as cli
from bucketrank.cli import arguments, main
from bucketrank.cli.arguments import Commands, run
from bucketrank.errors import (
    BucketrankError,
    DataError,
    DiskFullError,
    ExportError,
    MissingPackageError,
    NonFiniteLossError,
    OutOfMemoryError,
    RecipeError,
    UsageError,
)


def fresh(code: str) -> str:
    """Return what a new interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--help"],
        ["--version"],
        ["convert", "--help"],
        ["convert", "voc", "--help"],
        ["calibrate", "--help"],
        ["check-data", "--help"],
        ["demo", "--help"],
        ["export", "--help"],
        ["predict", "--help"],
        ["report", "--help"],
        ["train", "atss-r50-rs", "--help"],
        ["eval", "--help"],
        ["recipes"],
        ["recipes", "atss-r50-rs"],
    ],
)
def test_help_waits_for_nothing_heavy(words: list[str]) -> None:
    code = f"""
import sys
from bucketrank.cli import main
try:
    status = main({words!r})
except SystemExit as end:
    status = end.code
heavy = [name for name in ("torch", "numpy", "numba", "matplotlib", "rich") if name in sys.modules]
print(f"status {{status}}, heavy {{heavy}}")
"""
    assert fresh(code).splitlines()[-1] == "status 0, heavy []"


@pytest.mark.slow
def test_that_test_bites() -> None:
    assert fresh("import sys, bucketrank; bucketrank.ap_loss; print('torch' in sys.modules)") == "True\n"


def test_data_is_checked_and_converted_without_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from bucketrank.cli import main
from bucketrank.data import write_shapes
write_shapes({str(tmp_path / "shapes")!r}, train=2, val=1, size=64)
status = main(["check-data", {str(tmp_path / "shapes")!r}])
status += main(["convert", "voc", {str(tmp_path)!r}, {str(tmp_path / "new")!r}])
print(f"status {{status}}, torch {{'torch' in sys.modules}}")
"""
    assert fresh(code).splitlines()[-1] == "status 1, torch False", "the conversion finds nothing, and says so"


def test_overview_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:4] == ["bucketrank", "eval", "Evaluate", "a"] for line in lines)
    assert any(line.startswith("  bucketrank convert voc ") for line in lines)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"bucketrank {__version__}\n"


@pytest.mark.parametrize(
    "words", [["convert", "yool"], ["yolo"], ["convret", "yolo"], ["convert-yolo"], ["convert", "x-yolo", "--copy"]]
)
def test_a_wrong_command_names_the_nearest(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert 'the nearest is "bucketrank convert yolo"' in capsys.readouterr().err


@pytest.mark.parametrize("words", [["trian", "atss-laptop", "my-data"], ["trian"], ["tarin", "--help"]])
def test_the_arguments_do_not_hide_the_nearest_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert 'the nearest is "bucketrank train"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["eval", "w", "d", "--given-box"], "--given-boxes"),
        (["report", "run", "--image", "3"], "--images"),
        (["check-data", "d", "--no-deocde"], "--no-decode"),
        (["predict", "w", "i", "--treshold=3"], "--threshold"),
        (["train", "atss-laptop", "--momentum", "3"], "--schedule.momentum"),
        (["check-data", "folder", "--mask"], "--masks"),
        (["check-data", "--worker", "3", "folder"], "--workers"),
        (["convert", "yolo", "a", "b", "--cpoy"], "--copy"),
    ],
)
def test_a_wrong_flag_names_the_nearest(words: list[str], nearest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    typed = next(word for word in words if word.startswith("--"))
    assert f'there is no flag "{typed.partition("=")[0]}"; the nearest is "{nearest}"' in capsys.readouterr().err


def test_what_comes_without_a_flag(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given: list[object] = []

    def copy(
        source: Annotated[Path, "from"], destination: Annotated[Path, "to"], *, fast: Annotated[bool, "go"] = False
    ) -> int:
        """Copies."""
        given.extend([source, destination, fast])
        return 3

    monkeypatch.setattr(cli, "COMMANDS", {"copy": copy})
    assert main(["copy", "a", "--fast", "b"]) == 3, "what a command returns is the exit status"
    assert given == [Path("a"), Path("b"), True]
    assert main(["copy", "a"]) == 2
    assert capsys.readouterr().err == "bucketrank: copy: the following arguments are required: destination\n"


def test_nearest_of_several(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def nothing() -> None:
        """Nothing."""

    commands: Commands = {"bench": {"losses": nothing, "detectors": nothing}, "train": nothing}
    for typed, nearest in (
        ("trian", "train"),
        ("detector", "bench detectors"),
        ("bench loss", "bench losses"),
        ("bnech detectors", "bench detectors"),
    ):
        assert run(commands, typed.split(), program="python -m tools") == 2
        assert f'; the nearest is "python -m tools {nearest}"' in capsys.readouterr().err


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Let the packages appear as not installed."""
    usual = importlib.metadata.distribution

    def distribution(name: str) -> importlib.metadata.Distribution:
        if name in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return usual(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        (["check-data", "folder"], "rich", "detect"),
        (["check-data", "folder"], "pillow", "detect"),
        (["recipes"], "PyYAML", "detect"),
        (["demo"], "timm", "demo"),
        (["export", "w"], "onnxruntime", "export"),
    ],
)
def test_a_missing_package_says_how_to_install_it(
    words: list[str],
    package: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    without(monkeypatch, package.lower())
    assert main(words) == 2
    assert capsys.readouterr().err.lower() == (
        f'bucketrank: this command needs {package.lower()}; install with: pip install "bucketrank[{extra}]"\n'
    )


def test_packages_come_from_the_metadata(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["torch>=2.6", 'b>=1; extra == "small"', "a_c[x,y]>=2,!=3 ; python_version > '3' and extra == 'big'"]
    lines += ["bucketrank[small]; extra == 'big'", 'd; extra == "other"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: lines)
    assert arguments.extra_packages("big") == ["a_c", "b"]
    with pytest.raises(MissingPackageError, match="this command needs a_c and b; "):
        arguments.require("big")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert arguments._is_installed("onnxruntime"), "also if onnxruntime-gpu provides the module"


def test_every_extra_is_complete() -> None:
    """Each package that pyproject.toml lists for an extra is found in the metadata."""
    document = Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^detect = \[(.*)\]$", document, flags=re.MULTILINE)
    assert listed
    names = {re.match(r"[\w-]+", each.strip(' "'))[0] for each in listed[1].split('", "')}  # type: ignore[index]
    assert names - {"bucketrank"} <= {*arguments.extra_packages("detect")}


def greet(
    name: Annotated[str, "whom to greet"],
    *,
    times: Annotated[int, "how often"] = 1,
    pause: Annotated[float | None, "seconds between two"] = None,
    tone: Annotated[Literal["low", "high"], "tone of the voice"] = "low",
    loud: Annotated[bool, "shout"] = False,
    out: Annotated[Path | None, "file to write"] = None,
) -> None:
    """Greet somebody."""
    GREETINGS.append((name, times, pause, tone, loud, out))


GREETINGS: list[object] = []


def test_values_have_the_types_of_the_signature() -> None:
    GREETINGS.clear()
    words = ["greet", "2024", "--times", "3", "--pause", "1e-1", "--tone=high", "--loud", "--out", "2024-11-01"]
    assert run({"greet": greet}, words) == 0
    assert run({"greet": greet}, ["greet", "010", "--no-loud"]) == 0
    assert [("2024", 3, 0.1, "high", True, Path("2024-11-01")), ("010", 1, None, "low", False, None)] == GREETINGS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--times", "few"], "--times: expected a whole number, got 'few'"),
        (["--times", "1.5"], "--times: expected a whole number, got 1.5"),
        (["--times"], "--times: expected a whole number after it, got nothing"),
        (["--times", "--loud"], "--times: expected a whole number after it, got nothing"),
        (["--pause", "long"], "--pause: expected a number, got 'long'"),
        (["--tone", "hihg"], "--tone: expected one of low, high, got 'hihg'; the nearest is \"high\""),
        (["--loud=yes"], "--loud/--no-loud: expected no value after it"),
        (["twice"], "unrecognized arguments: twice"),
    ],
)
def test_wrong_values_name_the_flag(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run({"say": {"hello": greet}}, ["say", "hello", "Ada", *words], program="speak") == 2
    assert capsys.readouterr().err == f"speak: say hello: {message}\n"


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UsageError("--x: expected"), 2, "bucketrank: go: --x: expected"),
        (RecipeError("mine.yaml: expected"), 2, "bucketrank: go: mine.yaml: expected"),
        (DataError("a.json: expected"), 1, "bucketrank: a.json: expected"),
        (ExportError("expected"), 1, "bucketrank: go: expected"),
        (NonFiniteLossError("step 4: NaN"), 1, "bucketrank: go: step 4: NaN"),
        (DiskFullError("a.json: full"), 1, "bucketrank: go: a.json: full"),
        (OutOfMemoryError("a.json: too little"), 1, "bucketrank: go: a.json: too little"),
        (MissingPackageError("needs rich"), 2, "bucketrank: needs rich"),
        (FileNotFoundError(2, "No such file", "a.json"), 1, "bucketrank: a.json: No such file; check the path"),
        (OSError("server is gone"), 1, "bucketrank: server is gone"),
        (RuntimeError("CUDA out of memory. Tried\nmore"), 1, "bucketrank: go: not enough memory (CUDA out of memory."),
    ],
)
def test_errors_for_users_are_one_line_and_a_status(
    error: Exception, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    assert run({"go": fail}, ["go"]) == status
    printed = capsys.readouterr().err
    assert printed.startswith(message)
    assert printed.count("\n") == 1


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), ValueError("bug"), KeyError("bug")])
def test_a_bug_keeps_its_traceback(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        run({"go": fail}, ["go"])


def test_memory_disk_and_divergence_are_no_data_errors() -> None:
    for kind in (OutOfMemoryError, DiskFullError, NonFiniteLossError):
        assert issubclass(kind, BucketrankError)
        assert not issubclass(kind, DataError)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["eval", "w", "d", "--layout", "foo"],
            "eval: --layout: expected one of own, coco, lvis, roboflow, yolo, voc, got 'foo'",
        ),
        (["eval", "w", "d", "--split", "foo"], "eval: --split: expected one of val, train, test, got 'foo'"),
        (["calibrate", "w", "d", "--layout", "foo"], "calibrate: --layout: expected one of own, coco, lvis, roboflow"),
        (["check-data", "d", "--layout", "foo"], "check-data: --layout: expected one of own, coco, lvis, roboflow"),
    ],
)
def test_wrong_choices_are_wrong_usage(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_control_characters_of_a_data_set_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "cat\x1b[2J\x9b31m"
    image = {"id": 1, "file_name": f"{hostile}.png", "width": 8, "height": 8}
    document = {"images": [image], "categories": [{"id": 1, "name": hostile}] * 2, "annotations": []}
    (tmp_path / "train.json").write_text(json.dumps(document))
    assert main(["check-data", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert r"cat\x1b[2J" in printed
    assert not {"\x1b", "\x9b"} & {*printed}


def test_too_little_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise MemoryError

    monkeypatch.setattr(cli, "COMMANDS", {"train": fail})
    assert main(["train"]) == 1
    assert capsys.readouterr().err == (
        "bucketrank: train: not enough memory (the system refused more); use smaller images or batches\n"
    )


def test_control_c_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "COMMANDS", {"train": interrupt})
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "bucketrank: interrupted\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_without_half_a_file(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bucketrank.weights.atomic import write

    def save(temporary: Path) -> None:
        temporary.write_text("half")
        os.kill(os.getpid(), number)
        time.sleep(10)

    before = signal.getsignal(signal.SIGTERM)

    def export() -> None:
        write(tmp_path / "m.onnx", save)

    assert run({"export": export}, ["export"]) == 130
    assert capsys.readouterr().err == "bucketrank: interrupted\n"
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) == before


def without_wait_policy(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | more


@pytest.mark.parametrize(
    ("word", "chosen", "expected"),
    [("recipes", {}, "passive"), ("recipes", {"OMP_WAIT_POLICY": "active"}, "active")],
)
def test_waiting_threads_sleep_unless_the_user_chose(word: str, chosen: dict[str, str], expected: str) -> None:
    code = (
        "import os, sys; from bucketrank.cli import main; main(sys.argv[1:]); print(os.environ.get('OMP_WAIT_POLICY'))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, word],
        env=without_wait_policy(**chosen),
        check=True,
        capture_output=True,
        text=True,
    )
    assert result.stdout.splitlines()[-1] == expected


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="torch has libgomp, which shows its settings, on Linux only")
def test_torch_obeys_because_it_is_imported_later() -> None:
    code = "from bucketrank.cli import main; main(['recipes']); import torch"
    result = subprocess.run(
        [sys.executable, "-c", code], env=without_wait_policy(OMP_DISPLAY_ENV="verbose"), capture_output=True, text=True
    )
    assert set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", result.stderr)) == {"0"}, result.stderr
