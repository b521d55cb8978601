"""Fine-tuned snapshots from the command line: a run, its table, and the commands that take a run's folder."""

import json
from pathlib import Path

import pytest

from command import call

QUICK = [
    "--set", "model_args.width=8", "--set", "data_args.batch=256", "--set", "recipe.warmup_epochs=1", "--set",
    "recipe.neurons_per_round=8", "--set", "recipe.finetune_epochs=1", "--set", "recipe.keep=0.4", "--device", "cpu",
]  # fmt: skip


def test_a_run_with_snapshots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    given = ["run", *QUICK, "--set", "recipe.snapshots=[0.6, 0.8]", "--out", str(out), "--json"]
    assert call(*given) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)["snapshots"]
    assert [each["asked"] for each in found] == [0.8, 0.6]
    assert [each["path"] for each in found] == ["snapshots/0.8", "snapshots/0.6"]
    assert "snapshot 0.8: resumes after" in said.err
    for each in found:
        line = next(line for line in said.err.splitlines() if line.rstrip().endswith(each["path"]))
        assert line.split()[:4] == [
            f"{each['asked']:.2%}", f"{each['got']:.2%}", f"{each['metric']:.2%}", f"{each['parameters']:,}",
        ]  # fmt: skip
    assert "Fine-tuned snapshots" in (out / "page.html").read_text(encoding="utf-8")
    assert call(*given, "--resume") == 0
    assert json.loads(capsys.readouterr().out)["snapshots"] == found
    assert call("compare", str(out), "--out", str(tmp_path / "c")) == 0
    assert "accuracy of fine-tuned snapshots, and the κ they reached" in capsys.readouterr().out
    small = str(out / "snapshots" / "0.6")
    assert call("report", small) == 0
    assert call("sharpness", small, "--json") == 0
    assert call("export", small, str(tmp_path / "small.pt2")) == 0
    assert call("bench", small, "--batch", "8", "--device", "cpu", "--variant", "eager", "--repeats", "2") == 0
