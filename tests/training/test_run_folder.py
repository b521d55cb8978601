"""Run folders: checkpoints are written in the background, hold the state at their call, and never fail silently."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hgnp
from hgnp.io.weights import digest
from hgnp.training import checkpoint
from hgnp.training.measure import Measurements
from hgnp.training.run_folder import RunFolder
from train_cases import StopError, loaders, made, recipe

IN_A_THREAD = """
import sys, threading
from pathlib import Path
from hgnp.training.run_folder import RunFolder

def go():
    folder = RunFolder(Path(sys.argv[1]))
    with folder.locked(resume=False):
        folder.write_checkpoint({"epoch": 0})
        threading.main_thread().join()
        folder.write_checkpoint({"epoch": 1})

threading.Thread(target=go).start()
"""


def slowed(seconds: float, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes writing slow. What is being written is in the list."""
    write, under_way = checkpoint.write, []

    def slowly(file: Path, ready: checkpoint.Packed) -> None:
        under_way.append(file.name)
        time.sleep(seconds)
        write(file, ready)
        under_way.remove(file.name)

    monkeypatch.setattr(checkpoint, "write", slowly)
    return under_way


def prune(out: Path, **given: Any) -> hgnp.Result:
    return hgnp.prune(made(), *loaders(), recipe=recipe(), out=out, **given)


def test_a_checkpoint_holds_the_state_at_its_call_while_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, go, threads = checkpoint.write, threading.Event(), []

    def slowly(*args: Any) -> None:
        assert go.wait(60)
        threads.append(threading.current_thread())
        write(*args)

    folder = RunFolder(tmp_path)
    weight = torch.zeros(3)
    with folder.locked(resume=False):
        folder.write_checkpoint({"weight": weight})
        assert folder.checkpoint.exists()  # the first is waited for
        monkeypatch.setattr(checkpoint, "write", slowly)
        weight.fill_(1.0)
        folder.write_checkpoint({"weight": weight})  # does not wait
        weight.fill_(2.0)
        assert checkpoint.read(folder.checkpoint)["weight"].tolist() == [0.0] * 3
        go.set()
    assert checkpoint.read(folder.checkpoint)["weight"].tolist() == [1.0] * 3  # who leaves the folder waits
    assert threads
    assert threads[0] is not threading.main_thread()


@pytest.mark.parametrize("then", ["write", "leave"])
def test_a_checkpoint_that_cannot_be_written_raises(then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, tried = RunFolder(tmp_path), threading.Event()

    def full(*_: Any) -> None:
        tried.set()
        raise OSError(28, "No space left on device")

    def two() -> None:
        with folder.locked(resume=False):
            folder.write_checkpoint({"epoch": 1})
            monkeypatch.setattr(checkpoint, "write", full)
            folder.write_checkpoint({"epoch": 2})
            if then == "write":
                assert tried.wait(60)
                monkeypatch.undo()
                folder.write_checkpoint({"epoch": 3})
                pytest.fail("it went on")

    with pytest.raises(OSError, match=r"written \(No space left on device\); the last good checkpoint is"):
        two()
    # what could be written was, though the run ends
    assert checkpoint.read(folder.checkpoint) == {"epoch": 3 if then == "write" else 1}


def spoil(value: Any) -> None:
    """Changes all that can be changed, in place."""
    if isinstance(value, torch.Tensor):
        value.detach().copy_(torch.ones_like(value) - value if value.dtype != torch.bool else ~value)
    elif isinstance(value, np.ndarray):
        value += 1
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            spoil(part)
        if not isinstance(value, tuple):
            value.clear()


def test_a_packed_checkpoint_shares_no_memory_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(self: RunFolder, tree: dict[str, Any]) -> None:
        if tree["run"]["epoch"] == 4:
            ready = checkpoint.pack(tree)
            before = digest(ready.tensors, ready.about)
            live = [tree, adam.state, plateau.__dict__, made_net.state_dict()]
            spoil(live)
            assert digest(ready.tensors, ready.about) == before
            raise StopError
        keep(self, tree)

    keep, made_net = RunFolder.write_checkpoint, made()
    adam = torch.optim.Adam(made_net.parameters(), amsgrad=True)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(adam)
    monkeypatch.setattr(RunFolder, "write_checkpoint", look)
    with pytest.raises(StopError):
        hgnp.prune(
            made_net, *loaders(), recipe=recipe(mu=0.01, bound=0.0, schedule="constant"), optimizer=adam,
            scheduler=plateau, out=tmp_path / "run",
        )  # fmt: skip


def test_a_checkpoint_is_packed_after_the_last_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = checkpoint.pack

    def alone(tree: dict[str, Any]) -> checkpoint.Packed:
        assert not under_way
        return packed(tree)

    folder = RunFolder(tmp_path)
    with folder.locked(resume=False):
        folder.write_checkpoint({"epoch": 1})
        under_way = slowed(0.2, monkeypatch)
        monkeypatch.setattr(checkpoint, "pack", alone)
        folder.write_checkpoint({"epoch": 2})
        while not under_way:
            time.sleep(0.01)
        folder.write_checkpoint({"epoch": 3})
    assert checkpoint.read(folder.checkpoint) == {"epoch": 3}


def test_a_run_in_a_thread_outlives_the_main_one(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", IN_A_THREAD, str(tmp_path)], check=True, timeout=60)
    assert checkpoint.read(RunFolder(tmp_path).checkpoint) == {"epoch": 1}


def test_ctrl_c_while_waiting_does_not_leave_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)

    def two() -> None:
        with folder.locked(resume=False):
            folder.write_checkpoint({"epoch": 1})
            slowed(1.0, monkeypatch)
            folder.write_checkpoint({"epoch": 2})
            main = threading.get_ident()
            threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT]).start()
            folder.write_checkpoint({"epoch": 3})

    with pytest.raises(KeyboardInterrupt):
        two()
    assert checkpoint.read(folder.checkpoint) == {"epoch": 2}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no locks")
def test_a_folder_is_unlocked_while_workers_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hgnp.training.run_folder.LOCK_TIMEOUT", 0.0)
    with RunFolder(tmp_path).locked(resume=False):
        worker = os.fork()
        if worker == 0:  # as those of a DataLoader that its user keeps
            time.sleep(60)
            os._exit(0)
    try:
        with RunFolder(tmp_path).locked(resume=False):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_latencies_are_measured_while_nothing_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    latency, beside = Measurements.with_latency, []

    def watched(*args: Any) -> Any:
        beside.append(list(under_way))
        return latency(*args)

    under_way = slowed(0.3, monkeypatch)
    monkeypatch.setattr(Measurements, "with_latency", watched)
    prune(tmp_path / "run")
    assert beside == [[]]


@pytest.mark.parametrize("file", ["run.json", "metrics.jsonl", "model.safetensors", "result.json"])
def test_a_full_disk_raises_with_the_folders_name(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def full(draft: Path, path: Path) -> None:
        if path.name == file:
            raise OSError(28, "No space left on device")
        replace(draft, path)

    monkeypatch.setattr(os, "replace", full)
    last = "there is no checkpoint yet" if file == "run.json" else "the last good checkpoint is .*checkpoint"
    with pytest.raises(OSError, match=rf"run could not be written \(No space left on device\); {last}"):
        prune(tmp_path / "run")
    monkeypatch.undo()
    assert prune(tmp_path / "run", resume=True).reached


def test_a_run_whose_folder_is_moved_away_can_be_resumed(tmp_path: Path) -> None:
    def on_epoch(state: Any) -> None:
        if state.epoch == 1:
            shutil.move(tmp_path / "run", tmp_path / "moved")
        if state.epoch == 4:
            raise StopError

    whole = prune(tmp_path / "whole")
    with pytest.raises(StopError):
        prune(tmp_path / "run", on_epoch=on_epoch)
    for name in ("run", "moved"):
        again = prune(tmp_path / name, resume=True)
        torch.testing.assert_close(again.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
