"""A run that is killed at any moment and resumed ends as if nothing had happened, to the bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hgnp
from resumable import RECIPES, Net, recipe, run
from train_cases import StopError

Whole = Callable[[str], Path]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The folder of a run that was not interrupted, by the name of its recipe. Each is run once, and only read afterwards."""
    folders: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("whole") / name
            run(str(folders[name]), name)
        return folders[name]

    return of


def kill_once(condition: Callable[[], bool], out: Path, wait: float = 0.0) -> None:
    """Start a run with snapshots and kill it with its workers, so many seconds after the condition holds."""
    command = [sys.executable, str(Path(__file__).with_name("resumable.py")), str(out), "snapshots"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None and not condition():
        time.sleep(0.005)
    time.sleep(wait)
    assert process.poll() is None, "the run ended before it could be killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tensors(out: Path) -> dict[str, torch.Tensor]:
    return hgnp.load(out, Net()).state_dict()


def rows(out: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in lines]


def assert_same(one: Path, other: Path) -> None:
    assert rows(one) == rows(other)
    torch.testing.assert_close(tensors(one), tensors(other), rtol=0, atol=0)


@pytest.mark.parametrize("name", RECIPES)
def test_stopped_after_every_other_epoch_ends_the_same(name: str, whole: Whole, tmp_path: Path) -> None:
    epochs = len(rows(whole(name)))
    for _ in range(epochs + 2):
        try:
            pieces = run(str(tmp_path / "pieces"), name, on_epoch=_stop_after_checkpoint())
            break
        except StopError:
            continue
    assert pieces.epochs == epochs
    assert pieces.parts > 2
    assert_same(tmp_path / "pieces", whole(name))


def _stop_after_checkpoint() -> object:
    """Lets two epochs pass, so that their checkpoints are written, and stops in the next."""
    passed = []

    def on_epoch(_: object) -> None:
        if len(passed) == 2:
            raise StopError
        passed.append(True)

    return on_epoch


def test_killed_at_a_random_moment_and_while_a_snapshot_is_fine_tuned_ends_the_same(
    whole: Whole, tmp_path: Path
) -> None:
    killed, complete = tmp_path / "killed", whole("snapshots")
    first, second = ("snapshots/0.8", "snapshots/0.6")
    kill_once(lambda: epochs(killed) > 0, killed, wait=random.Random(5).uniform(0, 0.15))
    assert epochs(killed) < len(rows(complete))
    taken = json.loads((complete / "result.json").read_text())["snapshots"][1]["epoch"]
    kill_once(lambda: epochs(killed / second) > taken + 1, killed)
    assert rows(killed) == rows(complete)
    assert not (killed / "result.json").exists()
    run(str(killed), "snapshots")
    for part in (".", first, second):
        assert_same(killed / part, complete / part)
    one, other = (json.loads((out / "result.json").read_text()) for out in (complete, killed))
    assert one["snapshots"] == other["snapshots"]
    assert other["parts"] == 3


def epochs(out: Path) -> int:
    file = out / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_a_finished_run_is_returned(tmp_path: Path) -> None:
    first = run(str(tmp_path / "a"), "random")
    again = run(str(tmp_path / "a"), "random")
    assert again.as_dict() == first.as_dict()
    assert again.history == first.history
    x = torch.randn(4, 1, 8, 8)
    assert torch.equal(again.model.eval()(x), first.model.eval()(x))


def test_another_recipe_is_refused(whole: Whole) -> None:
    changed = hgnp.Recipe(**(recipe("random").as_dict() | {"lr": 0.01}))
    with pytest.raises(ValueError, match=r"resume: lr must be 0.05 as in .*, got 0.01"):
        hgnp.prune(Net(), [], recipe=changed, out=whole("random"), resume=True)
