"""Two checkouts are compared row by row."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import before_after
import epoch

ROOT = Path(__file__).parents[2]


def rows(seconds: float, memory: int, parameters: int = 10) -> dict[Any, dict[str, Any]]:
    """Of one process: a row with memory, and one without."""
    both = (("plain", seconds, memory), ("Taylor", 2 * seconds, 0))
    return {
        ("vgg16", 100.0, method): {"parameters": parameters, "seconds": s, "memory": m} for method, s, m in both
    }  # fmt: skip


def test_medians_are_compared_row_by_row() -> None:
    old = [rows(1e-3, 2**20), rows(2e-3, 2**20), rows(9e-3, 2**20)]
    new = [rows(8e-3, 2**21), rows(1e-3, 2**21), rows(1e-3, 2**21)]
    table = list(before_after.compared(old, new))
    assert table[2] == "| vgg16 | 100 % | plain | 2.00 | 1.00 | 0.500 | 9.000 | 1.00 | 2.00 | 2.000 |"
    assert table[3] == "| vgg16 | 100 % | Taylor | 4.00 | 2.00 | 0.500 | 9.000 | – | – | – |"
    assert table[5:] == ["seconds: geometric mean 0.500, largest 0.500", "memory: geometric mean 2.000, largest 2.000"]


def test_networks_of_different_sizes_are_not_compared() -> None:
    with pytest.raises(SystemExit, match=r"the networks must be the same, got \[10, 11\] parameters"):
        list(before_after.compared([rows(1e-3, 0)], [rows(1e-3, 0, parameters=11)]))


def test_a_row_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def tiny() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(256, 10))

    monkeypatch.setitem(epoch.NETS, "tiny", (tiny, epoch.NETS["vgg16"][1]))
    arguments = ["--nets", "tiny", "--methods", "plain", "--batch", "2", "--seconds", "0.001", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["before_after.py", "--measure", str(ROOT), *arguments])
    before_after.main()
    row = json.loads(capsys.readouterr().out)
    assert (row["net"], row["kept"], row["method"], row["memory"]) == ("tiny", 100.0, "plain", 0)
    assert row["parameters"] == sum(p.numel() for p in tiny().parameters())
    assert row["seconds"] > 0


def test_a_checkout_is_measured_in_a_separate_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "src" / "hgnp" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.touch()
    script = tmp_path / "script.py"  # in place of before_after.py: tells what it imports and what it is given
    script.write_text(
        "import json, sys, hgnp\n"
        "print('not a row')\n"
        "print(json.dumps({'net': hgnp.__file__, 'kept': 100.0, 'method': sys.argv[3], 'given': sys.argv[1:]}))\n"
    )
    monkeypatch.setattr(before_after, "__file__", str(script))
    (row,) = before_after.measured(tmp_path, ["plain"]).items()
    assert row[0] == (str(package), 100.0, "plain")
    assert row[1]["given"] == ["--measure", str(tmp_path), "plain"]
    script.write_text("raise SystemExit(1)")
    with pytest.raises(SystemExit, match="measuring failed, its messages are above"):
        before_after.measured(tmp_path, [])


def test_only_a_checkout_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "before_after.py"), str(ROOT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"{tmp_path} must be a folder with src/ and benchmarks/epoch.py" in done.stderr
