"""A run that is killed at any moment and resumed ends as if nothing had happened, to the bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import hgnp
from resumable import RECIPES, Net, recipe, run
from train_cases import StopError

HERE = Path(__file__).parent


def start(out: Path, name: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "resumable.py"), str(out), name]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True, text=True)


def tensors(out: Path) -> dict[str, torch.Tensor]:
    return hgnp.load(out, Net()).state_dict()


def rows(out: Path) -> list[dict[str, object]]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in found]


@pytest.mark.parametrize("name", RECIPES)
def test_stopped_after_every_other_epoch_ends_the_same(name: str, tmp_path: Path) -> None:
    whole = run(str(tmp_path / "whole"), name)
    for _ in range(whole.epochs + 2):
        try:
            pieces = run(str(tmp_path / "pieces"), name, on_epoch=_stop_after_checkpoint())
            break
        except StopError:
            continue
    assert pieces.epochs == whole.epochs
    assert rows(tmp_path / "pieces") == rows(tmp_path / "whole")
    torch.testing.assert_close(tensors(tmp_path / "pieces"), tensors(tmp_path / "whole"), rtol=0, atol=0)
    assert pieces.parts > 2


def _stop_after_checkpoint() -> object:
    """Lets two epochs pass, so that their checkpoints are written, and stops in the next."""
    passed = []

    def on_epoch(_: object) -> None:
        if len(passed) == 2:
            raise StopError
        passed.append(True)

    return on_epoch


def test_killed_at_random_moments_ends_the_same(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(str(whole), "hgnp")
    moments = random.Random(5)
    done = [0]
    for _ in range(2):
        process = start(killed, "hgnp")
        while process.poll() is None and epochs(killed) <= done[-1]:
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.15))
        assert process.poll() is None, "the run ended before it could be killed"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        done.append(epochs(killed))
    run(str(killed), "hgnp")
    assert 0 < done[1] < done[-1] < len(rows(whole))
    assert rows(killed) == rows(whole)
    torch.testing.assert_close(tensors(killed), tensors(whole), rtol=0, atol=0)


def test_killed_while_a_snapshot_is_fine_tuned_ends_the_same(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(str(whole), "snapshots")
    first, second = ("snapshots/0.8", "snapshots/0.6")
    taken = json.loads((whole / "result.json").read_text())["snapshots"][1]["epoch"]
    process = start(killed, "snapshots")
    while process.poll() is None and epochs(killed / second) <= taken + 1:
        time.sleep(0.005)
    assert process.poll() is None, "the run ended before it could be killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (killed / "result.json").exists()
    run(str(killed), "snapshots")
    for part in (".", first, second):
        assert rows(killed / part) == rows(whole / part)
        torch.testing.assert_close(tensors(killed / part), tensors(whole / part), rtol=0, atol=0)
    one, other = (json.loads((out / "result.json").read_text())["snapshots"] for out in (whole, killed))
    assert one == other


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


def test_another_recipe_is_refused(tmp_path: Path) -> None:
    run(str(tmp_path / "a"), "random")
    changed = hgnp.Recipe(**(recipe("random").as_dict() | {"lr": 0.01}))
    with pytest.raises(ValueError, match=r"resume: lr must be 0.05 as in .*, got 0.01"):
        hgnp.prune(Net(), [], recipe=changed, out=tmp_path / "a", resume=True)
