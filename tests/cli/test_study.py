"""`hgnp study` with everything real: processes that are killed, interrupted, resumed, and compared at the end."""

import contextlib
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command import call
from hgnp.cli.study import StudyLines
from hgnp.experiments import study_plan

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds its children in Linux' /proc")

NETWORK = """
import time
from pathlib import Path

import torch
from torch import nn

HOLD = Path(__file__).with_name("hold")


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3))


class Batches(list):
    epochs = 0

    def __iter__(self):
        deadline = time.monotonic() + 60
        while self.epochs > 2 and HOLD.exists() and time.monotonic() < deadline:  # to be killed or interrupted
            time.sleep(0.01)
        self.epochs += 1
        return super().__iter__()


def loaders():
    x, y = torch.randn(48, 4, generator=torch.Generator().manual_seed(1)), torch.arange(48) % 3
    return Batches([(x[:24], y[:24]), (x[24:], y[24:])]), [(x, y)]
"""
CONFIG = """
model: tiny:Net
data: tiny:loaders
recipe: {keep: 0.5, warmup_epochs: 5, neurons_per_round: 6, finetune_epochs: 1, measure: none}
"""
STUDY = """
name: small
networks: tiny.yaml
methods:
  hgnp: {method: hgnp}
  plain: {set: {recipe.method: taylor}}
  diverges: {method: taylor, set: {recipe.lr: 1e30}}
seeds: 1
baseline: plain
set: {recipe.lr: 0.02}
"""
RUNS = ["tiny-hgnp-0", "tiny-plain-0", "tiny-diverges-0"]


def start(*arguments: str, in_background: bool = False) -> "subprocess.Popen[str]":
    """The command in a process; in the background of a shell script, where SIGINT is ignored."""
    return subprocess.Popen(
        [sys.executable, "-m", "hgnp", "study", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if in_background else None,
    )


def finish(*arguments: str) -> tuple[int, str, str]:
    """The command in this process, where nothing interrupts it: exit code, stdout, stderr."""
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        patch.setenv("OMP_NUM_THREADS", "1")  # of its runs
        code = call("study", *arguments)
    return code, out.getvalue(), errors.getvalue()


def children(process: "subprocess.Popen[str]") -> list[int]:
    return [int(each) for each in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """Not gone, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], Any], process: "subprocess.Popen[str]") -> Any:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if found := condition():
            return found
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    raise TimeoutError


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    return [{key: value for key, value in json.loads(line).items() if "seconds" not in key} for line in lines]


def times(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study's file."""
    place = tmp_path_factory.mktemp("study")
    for name, text in {"small.yaml": STUDY, "tiny.yaml": CONFIG, "tiny.py": NETWORK}.items():
        (place / name).write_text(text)
    return place


@pytest.fixture(scope="module")
def interrupted(study: Path) -> Path:
    """The output of a study of two runs at once. Its first run was killed, and the others went on, one of them to diverge. A
    second call was interrupted while it resumed the first run."""
    hold, out = study / "hold", study / "out"
    command = [str(study / "small.yaml"), "--out", str(out), "--device", "cpu"]
    first = out / RUNS[0]

    hold.touch()
    process = start(*command, "--jobs", "2")
    wait_for(lambda: rows(first), process)
    os.kill(children(process)[0], signal.SIGKILL)
    hold.unlink()
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert f"hgnp: {RUNS[0]} failed: killed by SIGKILL (see {out}/logs/{RUNS[0]}.log)" in errors
    assert f"hgnp: {RUNS[2]} failed: the loss is nan in epoch 0" in errors
    assert "hgnp: 2 of 3 runs failed; run the same command to retry them" in errors
    assert [(out / name / "result.json").exists() for name in RUNS] == [False, True, False]
    assert f"{RUNS[1]}: epoch " in said
    assert f"{RUNS[2]}: failed: " in said
    assert "(3 of 3)" in said
    assert "plain" in (out / "summary.csv").read_text()  # the one that finished
    kept = json.loads((out / "study.json").read_text())
    assert [(run["method"], run["error"] is None) for run in kept["runs"]] == [
        ("hgnp", False), ("plain", True), ("diverges", False)
    ]  # fmt: skip

    hold.touch()
    done = len(rows(first))
    process = start(*command, "--seeds", "0", "--methods", "hgnp,diverges")
    wait_for(lambda: len(rows(first)) > done, process)
    begun = children(process)
    assert len(begun) == 1  # one after the other
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=120)[1]
    hold.unlink()
    assert process.returncode == 130
    again = f"hgnp study {shlex.join(command)} --seeds 0 --methods hgnp,diverges"
    assert f"hgnp: interrupted; {again} resumes every run after its last checkpoint" in errors
    assert not any(alive(pid) for pid in begun)
    assert "hgnp: interrupted" in (out / "logs" / f"{RUNS[0]}.log").read_text()  # by itself, not killed
    assert not (first / "result.json").exists()
    return out


@pytest.fixture(scope="module")
def whole(interrupted: Path) -> Path:
    """The output of the study, resumed to its end."""
    out, finished = interrupted, interrupted / RUNS[1]
    before = times(finished)
    command = [str(out.parent / "small.yaml"), "--out", str(out), "--device", "cpu", "--methods", "hgnp,plain"]
    code, said, errors = finish(*command, "--json")
    assert code == 0, errors
    assert "2 runs, 1 already finished, 1 to run" in errors
    assert json.loads((out / RUNS[0] / "result.json").read_text())["parts"] == 3
    assert times(finished) == before
    told = json.loads(said.splitlines()[-1])
    assert [run["run"] for run in told["runs"]] == RUNS[:2]
    assert [run["error"] for run in told["runs"]] == [None] * 2
    (compared,) = told["comparison"]["experiments"]
    assert [(group["label"], group["method"], group["seeds"]) for group in compared["groups"]] == [
        ("hgnp", "hgnp", [0]),
        ("plain", "taylor", [0]),
    ]
    assert compared["baseline"] == "plain"
    for name in ("page.html", "summary.csv", "comparison.json", "study.json", "figures/metric_against_kept.png"):
        assert (out / name).is_file()
    return out


def test_a_study_that_is_killed_ends_its_runs_and_the_same_command_resumes_them(study: Path, tmp_path: Path) -> None:
    hold, out = study / "hold", tmp_path / "out"
    command = [str(study / "small.yaml"), "--out", str(out), "--device", "cpu", "--methods", "hgnp,plain"]
    hold.touch()
    process = start(*command, "--jobs", "2", in_background=True)
    wait_for(lambda: rows(out / RUNS[0]) and rows(out / RUNS[1]), process)
    begun = children(process)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 30
    while any(map(alive, begun)) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = [pid for pid in begun if alive(pid)]
    hold.unlink()
    assert left == []
    code, _, errors = finish(*command)
    assert (code, errors) == (0, "")
    assert [(out / name / "result.json").exists() for name in RUNS[:2]] == [True, True]


def test_a_run_that_was_killed_and_interrupted_ends_as_one_that_was_not(whole: Path, tmp_path: Path) -> None:
    alone = [
        "--set",
        "recipe.lr=0.02",
        "--method",
        "hgnp",
        "--seed",
        "0",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "x"),
    ]
    assert call("run", str(whole.parent / "tiny.yaml"), *alone) == 0
    assert rows(whole / RUNS[0]) == rows(tmp_path / "x")
    assert (whole / RUNS[0] / "model.safetensors").read_bytes() == (tmp_path / "x" / "model.safetensors").read_bytes()


def test_finished_runs_are_recognised_without_their_weights_and_others_are_refused_by_name(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in RUNS[:2]:
        (tmp_path / "x" / name).mkdir(parents=True)
        for file in ("run.json", "config.yaml", "metrics.jsonl", "result.json"):
            shutil.copy(whole / name / file, tmp_path / "x" / name / file)
    before = {name: times(tmp_path / "x" / name) for name in RUNS[:2]}
    command = ["study", str(whole.parent / "small.yaml"), "--out", str(tmp_path / "x"), "--methods", "hgnp,plain"]
    assert call(*command, "--dry-run") == 0
    assert [line.split()[:4] for line in capsys.readouterr().out.splitlines()] == [
        ["#", "finished:", "hgnp", "run"]
    ] * 2
    assert call(*command, "--set", "recipe.mu=0.5") == 2
    assert capsys.readouterr().err == (
        f"hgnp: {tmp_path / 'x' / RUNS[0]} must have been run with recipe.mu=0.5 as in the study, got 0.001; "
        "choose another --out, or move the folder away to run it again\n"
    )
    assert call("study", str(whole.parent / "small.yaml"), "--out", str(tmp_path / "x" / RUNS[0])) == 2
    assert "which holds a run; choose another" in capsys.readouterr().err
    (tmp_path / "x" / RUNS[1] / "config.yaml").unlink()
    assert call(*command) == 2
    assert f"{RUNS[1]} must hold a run of hgnp run, got one without config.yaml" in capsys.readouterr().err
    before[RUNS[1]].pop("config.yaml")
    assert before == {name: times(tmp_path / "x" / name) for name in RUNS[:2]}


def test_without_a_terminal_a_study_prints_each_running_run_s_epoch_and_time_left(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = study_plan.read(study / "small.yaml").runs(device="cpu", methods=["hgnp", "plain"])
    logs, stream, line = (
        tmp_path / "logs",
        io.StringIO(),
        "epoch   4 prune     loss 1.0986  kept 81.0%  2.0 s  9 s left",
    )
    logs.mkdir()
    (logs / f"{RUNS[0]}.log").write_text(f"$ hgnp run tiny.yaml\ntiny: hgnp\n{line}\n")
    (logs / f"{RUNS[1]}.log").write_text("$ hgnp run tiny.yaml\n")
    shown = StudyLines(tmp_path, 2, 0, stream)
    shown.tick(planned)
    assert stream.getvalue() == ""
    monkeypatch.setattr("hgnp.cli.study.MINUTE", 0.0)
    shown.tick(planned)
    assert stream.getvalue().splitlines() == [f"{RUNS[0]}: {line}", f"{RUNS[1]}: starting"]
