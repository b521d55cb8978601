"""`hgnp study` with everything real: processes that are killed, interrupted, resumed, and compared at the end."""

import contextlib
import io
import json
import os
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

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds its children in Linux' /proc")

STUDY = """
name: small
networks: demo
methods:
  hgnp: {method: hgnp}
  plain: {set: {recipe.method: taylor}}
  diverges: {method: taylor, set: {recipe.lr: 1e30}}
seeds: 1
baseline: plain
set:
  model_args.width: 4
  data_args.batch: 512
  recipe.warmup_epochs: 8
  recipe.neurons_per_round: 24
  recipe.finetune_epochs: 1
  recipe.keep: 0.5
  recipe.measure: none
"""
RUNS = ["demo-hgnp-0", "demo-plain-0"]


def start(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "hgnp", "study", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
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
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study, two runs at once, whose first run was killed in the middle, so that the others went on; then resumed by the same
    command."""
    place = tmp_path_factory.mktemp("study")
    (place / "small.yaml").write_text(STUDY)
    out = place / "out"
    command = [
        str(place / "small.yaml"),
        "--out",
        str(out),
        "--device",
        "cpu",
        "--jobs",
        "2",
        "--methods",
        "hgnp,plain",
    ]
    first = out / RUNS[0]

    process = start(*command)
    wait_for(lambda: len(rows(first)) >= 2, process)
    os.kill(children(process)[0], signal.SIGKILL)
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert f"hgnp: {RUNS[0]} failed: killed by SIGKILL (see {out}/logs/{RUNS[0]}.log)" in errors
    assert "hgnp: 1 of 2 runs failed; run the same command to retry them" in errors
    assert [(out / name / "result.json").exists() for name in RUNS] == [False, True]
    assert f"{RUNS[1]}: epoch " in said
    assert "(2 of 2)" in said
    assert (out / "page.html").exists()  # of the other
    before = {name: times(out / name) for name in RUNS[1:]}

    code, said, errors = finish(*command, "--json")
    assert code == 0, errors
    assert "2 runs, 1 already finished, 1 to run" in errors
    assert json.loads((first / "result.json").read_text())["parts"] == 2
    assert before == {name: times(out / name) for name in RUNS[1:]}
    told = json.loads(said.splitlines()[-1])
    assert [run["run"] for run in told["runs"]] == RUNS
    assert [run["error"] for run in told["runs"]] == [None] * 2
    (study,) = told["comparison"]["studies"]
    assert [(group["label"], group["method"], group["seeds"]) for group in study["groups"]] == [
        ("hgnp", "hgnp", [0]),
        ("plain", "taylor", [0]),
    ]
    assert study["baseline"] == "plain"
    for name in ("page.html", "summary.csv", "comparison.json", "study.json", "figures/metric_against_kept.png"):
        assert (out / name).is_file()
    return out


def test_an_interrupted_study_resumes_and_a_failed_run_leaves_the_rest_compared(whole: Path, tmp_path: Path) -> None:
    file, out = str(whole.parent / "small.yaml"), tmp_path / "x"
    command = [file, "--out", str(out), "--device", "cpu", "--seeds", "0", "--methods", "hgnp,diverges"]
    first = out / RUNS[0]
    process = start(*command)
    wait_for(lambda: len(rows(first)) >= 2, process)
    begun = children(process)
    assert len(begun) == 1  # one after the other
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    again = f"hgnp study {file} --out {out} --device cpu --seeds 0 --methods hgnp,diverges"
    assert f"hgnp: interrupted; {again} resumes every run after its last completed epoch" in errors
    assert not any(alive(pid) for pid in begun)
    assert "hgnp: interrupted" in (out / "logs" / f"{RUNS[0]}.log").read_text()  # by itself, not killed
    assert not (first / "result.json").exists()

    code, said, errors = finish(*command)
    assert code == 1
    assert rows(first) == rows(whole / RUNS[0])  # of two at once, killed elsewhere
    assert (first / "model.safetensors").read_bytes() == (whole / RUNS[0] / "model.safetensors").read_bytes()
    assert "demo-diverges-0: failed: " in said
    failed, count = errors.splitlines()
    assert failed.startswith("hgnp: demo-diverges-0 failed: the loss is nan in epoch 0")
    assert count == "hgnp: 1 of 2 runs failed; run the same command to retry them"
    assert "hgnp" in (out / "summary.csv").read_text()
    kept = json.loads((out / "study.json").read_text())
    assert [(run["method"], run["error"] is None) for run in kept["runs"]] == [("hgnp", True), ("diverges", False)]


def test_finished_runs_are_recognised_without_their_weights_and_others_are_refused_by_name(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in RUNS:
        (tmp_path / "x" / name).mkdir(parents=True)
        for file in ("run.json", "config.yaml", "metrics.jsonl", "result.json"):
            shutil.copy(whole / name / file, tmp_path / "x" / name / file)
    before = {name: times(tmp_path / "x" / name) for name in RUNS}
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
    assert before == {name: times(tmp_path / "x" / name) for name in RUNS}
