"""What can go wrong with a run: one line each, and nothing lost."""

import copy
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hgnp
from train_cases import Net, loaders, made, recipe, stripes


def refused(message: str, error: type[Exception] = ValueError, net: nn.Module | None = None, **given: Any) -> None:
    train, val = loaders()
    arguments: dict[str, Any] = {"train": train, "val": val, "recipe": recipe()} | given
    with pytest.raises(error, match=message) as caught:
        hgnp.prune(net or made(), arguments.pop("train"), arguments.pop("val"), **arguments)
    assert "\n" not in str(caught.value)


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    x, y = stripes()
    refused("train: the loader yields nothing", train=[])
    refused("train: the loader yields nothing", train=iter([(x, y)]))
    refused("val: the loader yields nothing", val=[])
    refused("train: label 7 is out of range; the network has 3 outputs", train=[(x, y), (x, torch.full((96,), 7))])
    refused("train: label -1 is out of range", train=[(x, y - 1)])
    refused(r"net: its output of shape \(96, 3\) does not fit labels of shape \(96, 1\)", train=[(x, y.view(-1, 1))])
    refused("net: it returned a tuple; output=lambda", net=_Tuple())
    refused("net: its forward failed on the first batch in a: ", train=[(x.repeat(1, 2, 1, 1), y)])
    refused("train: a batch is 3 parts", train=[(x, y, y)])
    refused("train: a batch has x but no 'labels'", train=[{"x": x}])
    refused(
        "loss: it returned of shape", loss=lambda o, t: F.cross_entropy(o, t, reduction="none"), recipe=recipe(mu=0.0)
    )
    refused("keep: 0.001 of the params was asked; no less than", recipe=recipe(keep=0.001))
    refused("recipe: a dict was given", TypeError, recipe={"keep": 0.1})
    refused("resume: True was given without out", resume=True)
    refused("optimizer: LBFGS", optimizer=torch.optim.LBFGS)
    refused("optimizer: it holds parameters that are not", optimizer=torch.optim.SGD(made(3).parameters(), lr=0.1))
    refused("scheduler: it was given beside", recipe=recipe(schedule="cosine"), scheduler=lambda o: None)
    refused("protect: no module 'd'", protect=["d"])
    (tmp_path / "file").write_text("")
    refused("is a file; a folder would do", FileExistsError, out=tmp_path / "file")


class _Tuple(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


def test_a_failed_start_leaves_the_network_alone() -> None:
    net = made()
    before = copy.deepcopy(net.state_dict())
    x, y = stripes()
    refused("label -1", net=net, train=[(x, y - 1)])
    refused("keep: 0.001", net=net, recipe=recipe(keep=0.001))
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert net.training


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    hgnp.prune(made(), *loaders(), recipe=recipe(), out=tmp_path / "run")
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    refused("holds a run already; resume it", FileExistsError, out=tmp_path / "run")
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before


@pytest.mark.parametrize("method", ["hgnp", "taylor"])
def test_a_loss_that_is_not_finite_stops_the_run(method: str, tmp_path: Path) -> None:
    good = recipe(method=method, warmup_epochs=6)

    def explode(state: Any) -> None:
        if state.epoch == 1:
            with torch.no_grad():
                state.net.out.weight.mul_(math.inf)

    with pytest.raises(
        hgnp.DivergedError, match=r"the loss is nan in epoch 2, step 0; the last good checkpoint is .*, after 2"
    ):
        hgnp.prune(made(), *loaders(), recipe=good, out=tmp_path / "run", on_epoch=explode)
    with pytest.raises(hgnp.DivergedError, match="no checkpoint was kept"):
        hgnp.prune(made(), *loaders(), recipe=recipe(method=method, lr=1e20))


def test_a_disk_that_is_full_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: the same error from the same system call."""
    script = f"""
import resource, signal, sys
sys.path[:0] = [{str(Path(__file__).parent)!r}]
import hgnp
from train_cases import loaders, made, recipe
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def full(state):
    if state.epoch == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    hgnp.prune(made(), *loaders(), recipe=recipe(), out={str(tmp_path / "run")!r}, on_epoch=full)
except OSError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert "could not be written" in done.stdout, done.stderr
    assert "the last good checkpoint is" in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert not [p for p in (tmp_path / "run").iterdir() if p.name.startswith(".")]
    result = hgnp.prune(made(), *loaders(), recipe=recipe(), out=tmp_path / "run", resume=True)
    assert (result.epochs, result.parts) == (len(result.history), 2)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    refused("out: .* cannot be made", OSError, out="/proc/nowhere/run")


@pytest.mark.parametrize("make", [lambda: nn.ReLU()])
def test_nothing_to_train(make: Callable[[], nn.Module]) -> None:
    refused("net: it has no parameters", net=make())
