"""`hgnp run` with everything real, on a network of a few channels."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import hgnp
from command import call
from hgnp.experiments.data import digits
from hgnp.experiments.models import DigitsNet
from hgnp.progress import LineProgress

QUICK = [
    "--set", "model_args.width=8", "--set", "data_args.batch=256", "--set", "recipe.warmup_epochs=1", "--set",
    "recipe.neurons_per_round=16", "--set", "recipe.finetune_epochs=1", "--set", "recipe.keep=0.4", "--device", "cpu",
]  # fmt: skip


def rows(folder: str) -> list[dict[str, Any]]:
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if "seconds" not in key} for line in lines]


def test_a_run_prunes_saves_a_loadable_network_and_is_printed_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", *QUICK, "--out", "x") == 0
    shown = capsys.readouterr().out
    result = json.loads(Path("x/result.json").read_text())
    assert result["reached"]
    assert result["target"]["got"] <= 0.4
    net = hgnp.load("x", DigitsNet(width=8)).eval()
    assert sum(each.numel() for each in net.parameters()) == result["after"]["parameters"]
    with torch.no_grad():
        right = sum(int((net(x).argmax(1) == y).sum()) for x, y in digits(batch=256).val)
    assert right / 450 == pytest.approx(result["after"]["metric"], abs=1e-6)
    info = json.loads(Path("x/run.json").read_text())
    assert (info["name"], info["start"]) == ("demo", "random weights")
    assert (info["features"]["classes"], info["features"]["train_samples"]) == (10, 1347)

    files = {file: file.read_bytes() for file in Path("x").iterdir() if file.name != "config.yaml"}
    assert call("run", *QUICK, "--out", "x", "--resume") == 0
    again = capsys.readouterr().out
    assert shown[shown.index("  accuracy  ") :] == again[again.index("  accuracy  ") :]
    assert all(file.read_bytes() == content for file, content in files.items())


def test_the_written_configuration_gives_the_same_run_also_when_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("run", *QUICK, "--seed", "3", "--out", "whole") == 0
    with monkeypatch.context() as patch:
        # as by Ctrl-C, after the second epoch, in the middle of pruning
        patch.setattr(
            LineProgress, "epoch", lambda _, row, left: row["epoch"] == 1 and signal.raise_signal(signal.SIGINT)
        )
        assert call("run", "whole/config.yaml", "--out", "broken") == 130
    assert "hgnp run broken/config.yaml --out broken --resume" in capsys.readouterr().err
    assert len(rows("broken")) == 2
    assert call("run", "broken/config.yaml", "--out", "broken", "--resume") == 0
    assert len(rows("broken")) > 2
    assert rows("broken") == rows("whole")
    nets = [hgnp.load(each, DigitsNet(width=8)).state_dict() for each in ("whole", "broken")]
    assert all(torch.equal(value, nets[1][name]) for name, value in nets[0].items())


def test_a_run_that_diverges_ends_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", *QUICK, "--set", "recipe.lr=1e30", "--out", "x") == 1
    err = capsys.readouterr().err
    assert err.startswith("hgnp: ")
    assert err.count("\n") == 1


def test_a_run_that_is_refused_leaves_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", *QUICK, "--set", "recipe.keep=1e-6", "--out", "x") == 2
    assert "keep must be at least" in capsys.readouterr().err
    assert not Path("x").exists()


def test_a_run_without_a_folder_leaves_what_is_there_alone() -> None:
    Path("runs/demo").mkdir(parents=True)
    Path("runs/demo/model.safetensors").write_bytes(b"mine")
    assert call("run", *QUICK) == 0
    assert Path("runs/demo/model.safetensors").read_bytes() == b"mine"
    assert Path("runs/demo-2/result.json").is_file()
