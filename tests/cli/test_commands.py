"""The command line: quick help, and messages that name the nearest command, flag or value."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import pytest

from bucketrank import __version__, cli
from bucketrank.cli import main


def fresh(code: str) -> str:
    """Return what a new interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--help"],
        ["--version"],
        ["bench", "--help"],
        ["bench", "losses", "--help"],
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
    assert any(line.split()[:5] == ["bucketrank", "bench", "losses", "Measure", "time,"] for line in lines)
    assert any(line.startswith("  bucketrank convert voc ") for line in lines)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"bucketrank {__version__}\n"


@pytest.mark.parametrize(
    "words", [["bench", "loses"], ["losses"], ["benhc", "losses"], ["bnech"], ["bench", "x", "--quick"]]
)
def test_a_wrong_command_names_the_nearest(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert 'the nearest is "bucketrank bench losses"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["bench", "losses", "--quik"], "--quick"),
        (["bench", "losses", "--max-second-per-cell", "3"], "--max-seconds-per-cell"),
        (["bench", "losses", "--no-memroy"], "--no-memory"),
        (["bench", "losses", "--quick", "--repeat=3"], "--repeats"),
        (["check-data", "folder", "--mask"], "--masks"),
        (["check-data", "--worker", "3", "folder"], "--workers"),
        (["convert", "yolo", "a", "b", "--cpoy"], "--copy"),
    ],
)
def test_a_wrong_flag_names_the_nearest(words: list[str], nearest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    typed = next(word for word in words if word.startswith("--") and word not in ("--quick",))
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

    monkeypatch.setattr(cli, "COMMANDS", {"bench": {"losses": nothing, "detectors": nothing}, "train": nothing})
    for typed, nearest in (
        ("trian", "train"),
        ("detector", "bench detectors"),
        ("bench loss", "bench losses"),
        ("bnech detectors", "bench detectors"),
    ):
        assert main(typed.split()) == 2
        assert f'"bucketrank {nearest}"' in capsys.readouterr().err


@pytest.mark.parametrize("module", ["rich", "matplotlib", "jsonargparse"])
def test_a_missing_package_says_how_to_install_it(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["bench", "losses"]) == 2
    assert capsys.readouterr().err == (
        f'bucketrank: this command needs {module}; install with: pip install "bucketrank[bench]"\n'
    )


@pytest.mark.parametrize(("module", "package"), [("PIL", "pillow"), ("faster_coco_eval", "faster-coco-eval")])
def test_a_package_that_data_needs(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["check-data", "folder"]) == 2
    assert f'needs {package}; install with: pip install "bucketrank[detect]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sizes", "many"], "--sizes: expected numbers separated by commas, got 'many'"),
        (["--percent", "1,two"], "--percent: expected numbers separated by commas, got '1,two'"),
        (["--percent", "150"], "--percent: expected percentages between 0 and 100, got (150.0,)"),
        (["--repeats", "1"], "--repeats: expected at least 3, got 1"),
        (["--repeats", "few"], "--repeats: expected a whole number, got 'few'"),
        (["--max-seconds-per-cell", "long"], "--max-seconds-per-cell: expected a number, got 'long'"),
    ],
)
def test_wrong_values_name_the_flag(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "losses", *words]) == 2
    assert capsys.readouterr().err == f"bucketrank: bench losses: {message}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval", "w", "d", "--layout", "foo"], "eval: --layout: expected one of own, coco, lvis, roboflow, got 'foo'"),
        (["eval", "w", "d", "--split", "foo"], "eval: --split: expected one of val, train, got 'foo'"),
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
        "bucketrank: not enough memory (the system refused more); use smaller images or batches\n"
    )


def test_flags_follow_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(
        "bucketrank.bench.losses.loss_timing.measure_losses", lambda settings, progress: given.update(vars(settings))
    )
    monkeypatch.setattr("bucketrank.bench.losses.loss_report.show_loss_bench", lambda *_: None)
    monkeypatch.setattr("bucketrank.bench.losses.loss_report.write_loss_bench", lambda *_: [])
    main(["bench", "losses", "--quick", "--max-seconds-per-cell", "7", "--memory", "--sizes", "2K,1.5M", "--large"])
    assert given["max_seconds_per_cell"] == 7.0
    assert given["memory"] is given["large"] is True
    assert given["sizes"] == (2000, 1_500_000)
    assert given["percent"] == (0.1, 1.0, 5.0), "from --quick"
    main(["bench", "losses", "--no-memory", "--percent", "3"])
    assert given["memory"] is given["large"] is False
    assert given["percent"] == (3.0,)
    assert given["repeats"] == 40


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
    monkeypatch.setattr(cli, "COMMANDS", {"export": lambda: write(tmp_path / "m.onnx", save)})
    monkeypatch.setattr(cli, "call", lambda commands, words: commands[words[0]]())
    assert main(["export"]) == 130
    assert capsys.readouterr().err == "bucketrank: interrupted\n"
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) == before


def test_from_the_command_to_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results"
    words = ["--sizes", "500,2K", "--percent", "1,5", "--repeats", "3", "--no-memory", "--seed", "7", "--out", str(out)]
    assert main(["bench", "losses", *words]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["losses.json", "losses.md", "losses.png", "losses.svg"]
    document = json.loads((out / "losses.json").read_text(encoding="utf-8"))
    assert document["settings"]["sizes"] == [500, 2000]
    assert str(tmp_path) not in (out / "losses.json").read_text(encoding="utf-8")
    assert len(document["results"]) == 4 * 11
    printed = capsys.readouterr().out
    assert "AP loss: time" in printed
    assert "losses.png" in printed


def without_wait_policy(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | more


@pytest.mark.parametrize(
    ("word", "chosen", "expected"),
    [("recipes", {}, "passive"), ("recipes", {"OMP_WAIT_POLICY": "active"}, "active"), ("bench", {}, "None")],
)
def test_waiting_threads_sleep_unless_the_user_chose_or_torch_is_timed(
    word: str, chosen: dict[str, str], expected: str
) -> None:
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


@pytest.mark.skipif(sys.platform != "linux", reason="torch has libgomp, which shows its settings, on Linux only")
def test_torch_obeys_because_it_is_imported_later() -> None:
    code = "from bucketrank.cli import main; main(['recipes']); import torch"
    result = subprocess.run(
        [sys.executable, "-c", code], env=without_wait_policy(OMP_DISPLAY_ENV="verbose"), capture_output=True, text=True
    )
    assert set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", result.stderr)) == {"0"}, result.stderr
