"""A checkpoint is of its moment, is written beside the training, and is never lost in silence."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hgnp.training import checkpoint
from hgnp.training.folder import Folder


def test_a_checkpoint_is_of_its_moment_though_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, go, threads = checkpoint.write, threading.Event(), []

    def slowly(*args: Any) -> None:
        assert go.wait(60)
        threads.append(threading.current_thread())
        write(*args)

    folder = Folder(tmp_path)
    weight = torch.zeros(3)
    with folder.claimed(resume=False):
        folder.keep({"weight": weight})
        assert folder.checkpoint.exists()  # the first is waited for
        monkeypatch.setattr(checkpoint, "write", slowly)
        weight.fill_(1.0)
        folder.keep({"weight": weight})  # does not wait
        weight.fill_(2.0)
        assert checkpoint.read(folder.checkpoint)["weight"].tolist() == [0.0] * 3
        go.set()
    assert checkpoint.read(folder.checkpoint)["weight"].tolist() == [1.0] * 3  # who leaves the folder waits
    assert threads
    assert threads[0] is not threading.main_thread()


@pytest.mark.parametrize("then", ["keep", "leave"])
def test_one_that_cannot_be_written_is_told(then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, tried = Folder(tmp_path), threading.Event()

    def full(*_: Any) -> None:
        tried.set()
        raise OSError(28, "No space left on device")

    def two() -> None:
        with folder.claimed(resume=False):
            folder.keep({"epoch": 1})
            monkeypatch.setattr(checkpoint, "write", full)
            folder.keep({"epoch": 2})
            if then == "keep":
                assert tried.wait(60)
                monkeypatch.undo()
                folder.keep({"epoch": 3})
                pytest.fail("it went on")

    with pytest.raises(OSError, match=r"written to \(No space left on device\); the last good checkpoint is"):
        two()
    assert checkpoint.read(folder.checkpoint) == {"epoch": 1}
