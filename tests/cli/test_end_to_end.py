"""`hgnp run` with everything real, on a network of a few channels."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import hgnp
from hgnp.cli import app
from hgnp.experiments.digits import DigitsNet, digits

pytestmark = pytest.mark.skipif(not hasattr(hgnp, "prune"), reason="hgnp.prune is not there yet")

QUICK = [
    "--set", "model_args.width=8", "--set", "data_args.batch=256", "--set", "recipe.warmup_epochs=1", "--set",
    "recipe.neurons_per_round=16", "--set", "recipe.finetune_epochs=1", "--set", "recipe.keep=0.4", "--device", "cpu",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app(list(arguments))
    return int(ended.value.code or 0)


def rows(folder: str) -> list[dict[str, Any]]:
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]


def test_a_run_prunes_and_leaves_a_network_that_loads(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", *QUICK, "--out", "x", "--json") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["reached"]
    assert result["target"]["got"] <= 0.4
    net = hgnp.load("x", DigitsNet(width=8)).eval()
    assert sum(each.numel() for each in net.parameters()) == result["after"]["parameters"]
    val = digits(batch=256).val
    with torch.no_grad():
        right = sum(int((net(x).argmax(1) == y).sum()) for x, y in val)
    assert right / 450 == pytest.approx(result["after"]["metric"], abs=1e-6)
    info = json.loads(Path("x/run.json").read_text())
    assert info["name"] == "demo"
    assert info["start"] == "random weights"
    assert (info["features"]["classes"], info["features"]["train_samples"]) == (10, 1347)


def test_the_written_configuration_gives_the_same_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", *QUICK, "--seed", "3", "--out", "x") == 0
    assert call("run", "x/config.yaml", "--out", "y") == 0
    assert rows("x") == rows("y")


def test_a_finished_run_is_printed_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", *QUICK, "--out", "x") == 0
    first = capsys.readouterr().out
    before = Path("x/metrics.jsonl").read_bytes()
    assert call("run", *QUICK, "--out", "x", "--resume") == 0
    again = capsys.readouterr().out
    assert first[first.index("accuracy  ") :] == again[again.index("accuracy  ") :]
    assert Path("x/metrics.jsonl").read_bytes() == before


def test_a_run_that_diverges_ends_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", *QUICK, "--set", "recipe.lr=1e30", "--out", "x") == 1
    err = capsys.readouterr().err
    assert err.startswith("hgnp: ")
    assert err.count("\n") == 1


def test_an_interrupted_run_goes_on_to_the_same_end() -> None:
    command = [sys.executable, "-m", "hgnp", "run", *QUICK, "--set", "recipe.finetune_epochs=12"]
    assert subprocess.run([*command, "--out", "whole"], capture_output=True, timeout=120, check=False).returncode == 0
    broken = subprocess.Popen([*command, "--out", "broken"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    metrics = Path("broken/metrics.jsonl")
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        time.sleep(0.01)
    broken.send_signal(signal.SIGINT)
    _, err = broken.communicate(timeout=60)
    assert broken.returncode == 130, err
    assert "hgnp run broken/config.yaml --out broken --resume" in err
    assert "Traceback" not in err
    again = [sys.executable, "-m", "hgnp", "run", "broken/config.yaml", "--out", "broken", "--resume"]
    assert subprocess.run(again, capture_output=True, timeout=120, check=False).returncode == 0
    assert rows("broken") == rows("whole")
    nets = [hgnp.load(each, DigitsNet(width=8)).state_dict() for each in ("whole", "broken")]
    assert all(torch.equal(value, nets[1][name]) for name, value in nets[0].items())
