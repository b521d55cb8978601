"""Processes that share a GPU: they wait for each other, MPS is stopped again, and rates are added up. No GPU is needed."""

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import sharing

WORKER = """
import os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
(folder / str(os.getpid())).touch()
print("ready", flush=True)
sys.stdin.readline()
print(len(list(folder.iterdir())), flush=True)
"""


def test_no_process_starts_before_all_are_ready(tmp_path: Path) -> None:
    assert sharing.together([sys.executable, "-c", WORKER, str(tmp_path)], 3, {}) == [3, 3, 3]


FAILS = """
import os, sys, time
try:
    os.mkdir(os.path.join(os.environ["FOLDER"], "first"))
except FileExistsError:
    sys.exit(1)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_process_that_fails_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="a process must say that it is ready, got ''"):
        sharing.together([sys.executable, "-c", FAILS], 2, {"FOLDER": str(tmp_path)})


def test_the_daemon_is_started_in_its_own_folder_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control, log = tmp_path / sharing.CONTROL, tmp_path / "log"
    control.write_text(
        f'#!/bin/sh\nif [ -z "$1" ]; then read line; fi\necho "$1$line $CUDA_MPS_PIPE_DIRECTORY" >> {log}\n'
    )
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(RuntimeError, match="stop"), sharing.mps() as environment:
        raise RuntimeError("stop")
    folder = environment["CUDA_MPS_PIPE_DIRECTORY"]
    assert log.read_text().splitlines() == [f"-d {folder}", f"quit {folder}"]


def test_rates_are_added_up_and_compared_with_one_process_alone() -> None:
    lines = sharing.table([("1", [400.0]), ("2", [300.0, 340.0])])
    assert lines[2:] == ["| 1 | 400 | 400 | 1.00 |", "| 2 | 640 | 300, 340 | 1.60 |"]
