"""The commands of ``python -m benchmarks``: help, flags and messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_commands import without

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from benchmarks.__main__ import main

ROOT = Path(__file__).parents[2]


def test_help_waits_for_nothing_heavy() -> None:
    code = """
import sys
from benchmarks.__main__ import main
status = 0
for words in ([], ["--help"], ["losses", "--help"], ["detectors", "--help"], ["study", "--help"]):
    try:
        status += main(words)
    except SystemExit as end:
        status += end.code
heavy = [name for name in ("torch", "numpy", "numba", "matplotlib", "rich") if name in sys.modules]
print(f"status {status}, heavy {heavy}")
"""
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert printed.splitlines()[-1] == "status 0, heavy []"
    assert "usage: python -m benchmarks losses" in printed
    assert "  python -m benchmarks losses          Measure time" in printed


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["--quik"], "--quick"),
        (["--max-second-per-cell", "3"], "--max-seconds-per-cell"),
        (["--no-memroy"], "--no-memory"),
        (["--quick", "--repeat=3"], "--repeats"),
    ],
)
def test_a_wrong_flag_names_the_nearest(words: list[str], nearest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["losses", *words]) == 2
    assert f'the nearest is "{nearest}"' in capsys.readouterr().err


@pytest.mark.parametrize("module", ["rich", "matplotlib"])
def test_a_missing_package_says_how_to_install_it(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, module)
    assert main(["losses"]) == 2
    assert capsys.readouterr().err == (
        f'python -m benchmarks: this command needs {module}; install with: pip install "bucketrank[bench]"\n'
    )


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
    assert main(["losses", *words]) == 2
    assert capsys.readouterr().err == f"python -m benchmarks: losses: {message}\n"


def test_flags_follow_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(
        "benchmarks.losses.measure.measure_losses", lambda settings, progress: given.update(vars(settings))
    )
    monkeypatch.setattr("benchmarks.losses.report.show_loss_bench", lambda *_: None)
    monkeypatch.setattr("benchmarks.losses.report.write_loss_bench", lambda *_: [])
    main(["losses", "--quick", "--max-seconds-per-cell", "7", "--memory", "--sizes", "2K,1.5M", "--large"])
    assert given["max_seconds_per_cell"] == 7.0
    assert given["memory"] is given["large"] is True
    assert given["sizes"] == (2000, 1_500_000)
    assert given["percent"] == (0.1, 1.0, 5.0), "from --quick"
    main(["losses", "--no-memory", "--percent", "3"])
    assert given["memory"] is given["large"] is False
    assert given["percent"] == (3.0,)
    assert given["repeats"] == 40


def test_from_the_command_to_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results"
    words = ["--sizes", "500,2K", "--percent", "1,5", "--repeats", "3", "--no-memory", "--seed", "7", "--out", str(out)]
    assert main(["losses", *words]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["losses.json", "losses.md", "losses.png", "losses.svg"]
    document = json.loads((out / "losses.json").read_text(encoding="utf-8"))
    assert document["settings"]["sizes"] == [500, 2000]
    assert str(tmp_path) not in (out / "losses.json").read_text(encoding="utf-8")
    assert len(document["results"]) == 4 * 11
    printed = capsys.readouterr().out
    assert "AP loss: time" in printed
    assert "losses.png" in printed
