"""`hgnp.prune`: bad input, damaged folders, and the state they leave."""

import copy
import json
import math
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hgnp
from full_disk import full_disk
from train_cases import Net, StopError, loaders, made, recipe, stripes


class Signs(torch.optim.Optimizer):
    """Has no learning rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"step_size": 0.1})


def refused(message: str, error: type[Exception] = ValueError, net: nn.Module | None = None, **given: Any) -> None:
    train, val = loaders()
    arguments: dict[str, Any] = {"train": train, "val": val, "recipe": recipe()} | given
    with pytest.raises(error, match=message) as caught:
        hgnp.prune(net or made(), arguments.pop("train"), arguments.pop("val"), **arguments)
    assert "\n" not in str(caught.value)


def test_prune_refuses_bad_input_in_one_line(tmp_path: Path) -> None:
    x, y = stripes()
    refused("train must yield batches in every epoch, .* got none", train=[])
    refused(
        "train must be a DataLoader or a list of batches, got list_iterator, which is exhausted", train=iter([(x, y)])
    )
    refused(
        "val must be a DataLoader or a list of batches, got generator, which is exhausted", val=(b for b in [(x, y)])
    )
    refused("train must be a DataLoader or a list of batches, got int", TypeError, train=5)
    refused("val must yield batches in every epoch, .* got none", val=[])
    refused(
        "train: labels must be from 0 to 2, as the network has 3 outputs, got 7",
        train=[(x, y), (x, torch.full((96,), 7))],
    )
    refused("train: labels must be from 0 to 2, .* got -1", train=[(x, y - 1)])
    refused(
        r"net must return .* for train's labels of shape \(96, 1\), got an output of shape \(96, 3\)",
        train=[(x, y.view(-1, 1))],
    )
    refused(r"net must return a tensor, got tuple; pass output, such as lambda o: o\[0\]", net=_Tuple())
    refused(r"net must return a tensor, got dict; pass output, such as lambda o: o\['y'\]", net=_Dict())
    refused(
        r"train must be .* got the dataset TensorDataset; use DataLoader\(train, batch_size=…\)",
        TypeError,
        train=TensorDataset(x, y),
    )
    refused("net must take the first batch of train, but its forward failed in a: ", train=[(x.repeat(1, 2, 1, 1), y)])
    refused("train: a batch must be .*, got 3 parts", train=[(x, y, y)])
    refused("train: a batch must have the key 'labels', got x", train=[{"x": x}])
    refused(
        "loss must return one number, .* got a value of shape",
        loss=lambda o, t: F.cross_entropy(o, t, reduction="none"),
        recipe=recipe(mu=0.0),
    )
    refused(r"keep must be at least 0\.\d+ of the params, got 0\.001: every", recipe=recipe(keep=0.001))
    refused("every layer keeps a multiple of 8 and 3 neurons are frozen", recipe=recipe(keep=0.1, round_to=8))
    refused(r"what floor={'\?': 9}, round_to=1 and max_removed=1.0 leave", recipe=recipe(keep=0.1, floor={"?": 9}))
    refused(r"round_to: pattern must match a layer, got 'd'; there are a, b, c, out", recipe=recipe(round_to={"d": 8}))
    refused(r"floor: pattern must match .*'ou'; did you mean out\?", recipe=recipe(keep=1.0, floor={"*": 1, "ou": 2}))
    refused("recipe must be an hgnp.Recipe, .* got dict", TypeError, recipe={"keep": 0.1})
    refused("out must be the folder of the run with resume=True, got None", resume=True)
    refused("optimizer must evaluate the loss once per step, .* got LBFGS", optimizer=torch.optim.LBFGS)
    refused("optimizer must have its learning rate as 'lr' .* got 'step_size'", optimizer=Signs)
    refused(
        "optimizer must hold the network's parameters alone, got others",
        optimizer=torch.optim.SGD(made(3).parameters(), lr=0.1),
    )
    refused(
        "schedule must be None or 'constant' with a scheduler, got 'cosine'",
        recipe=recipe(schedule="cosine"),
        scheduler=lambda o: None,
    )
    refused("protect must name modules of the network, got 'd'", protect=["d"])
    refused("protect must be a list of module names, got NoneType", TypeError, protect=None)
    for name in ("loss", "metric", "unpack", "output", "on_step", "on_epoch", "optimizer", "scheduler"):
        refused(f"^{name}.*'x'", **{name: "x"})
    refused("verbose must be True or False, got 'x'", TypeError, verbose="x")
    refused("resume must be True or False, got 'x'", TypeError, resume="x")
    for name, argument in (("optimizer", "the parameters"), ("scheduler", "the optimizer"), ("on_epoch", "the state")):
        refused(f"{name} must be callable with {argument} alone, got .*: too many", **{name: lambda: 3})
    refused(
        "scheduler must be callable with the optimizer alone, got <class .*StepLR'>: missing a .*'step_size'",
        scheduler=torch.optim.lr_scheduler.StepLR,
    )
    net = made()
    refused(r"also\[0\] must be another network than net", net=net, also=[net])
    refused(
        r"loss must be a function or an instance, got the class CrossEntropyLoss; use CrossEntropyLoss\(\)",
        loss=nn.CrossEntropyLoss,
    )
    refused("loss must be a function, got None", loss=None)
    refused("metric must be a function or an object with update, compute and reset, got 5", metric=5)
    accumulator = type("F1", (), dict.fromkeys(("update", "compute", "reset"), lambda *arguments: 0.0))
    refused(r"metric must be a function or an instance, got the class F1; use F1\(\)", metric=accumulator)
    for off in (torch.no_grad(), torch.inference_mode()):
        with off:
            refused(r"gradients must be enabled, got torch.no_grad\(\)")
    refused("inputs must hold at least one sample, got an empty batch", train=[(x, y), (x[:0], y[:0])])
    refused("unpack must return .*, got Tensor", unpack=lambda batch: batch[0])
    refused("metric must return one number, higher is better, got a tensor of shape", metric=lambda out, target: out)
    refused("device must be one that PyTorch can use here, got abacus", device="abacus")
    refused("device must be one that PyTorch can use here, got 1.5", device=1.5)
    refused("out must be a string or a path, got int", TypeError, out=5)
    (tmp_path / "file").write_text("")
    refused("out must be a folder, got the file", FileExistsError, out=tmp_path / "file")


def test_bad_validation_data_is_refused_before_training() -> None:
    x, y = stripes()
    steps: list[int] = []

    def loss(out: Tensor, target: Tensor) -> Tensor:
        steps.append(torch.is_grad_enabled())
        return F.cross_entropy(out, target)

    refused("val must yield batches", val=[], loss=loss)
    refused("val: a batch must be .*, got 3 parts", val=[(x, y, y)], loss=loss)
    refused(
        "net must take the first batch of val, but its forward failed in a", val=[(x.repeat(1, 2, 1, 1), y)], loss=loss
    )
    refused(
        "val must be set with ReduceLROnPlateau",
        val=None,
        scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau,
        loss=loss,
    )
    assert not any(steps)  # none was a training step
    refused("val: labels must be from 0 to 2, .* got 5", val=[(x, y + 5)])
    refused("val: labels must be from 0 to 2, .* got 5", val=[(x, y), (x, y + 5)])


def test_a_batch_of_one_sample_is_refused_where_batch_norm_needs_more() -> None:
    x, y = stripes()
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    refused(
        "train must have batches of at least two samples .* got a single one in batch 1; use drop_last=True",
        net=net,
        train=[(x, y), (x[:1], y[:1])],
    )


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    net = made()
    other = torch.optim.SGD(net.parameters(), lr=0.1)
    refused(
        "scheduler must belong to the run's optimizer", net=net, scheduler=torch.optim.lr_scheduler.StepLR(other, 1)
    )


class _Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(*stripes(), strict=True)


def test_a_loader_whose_length_is_not_known() -> None:
    streamed = hgnp.prune(made(), DataLoader(_Stream(), 16), recipe=recipe(seed=1))
    counted = hgnp.prune(made(), DataLoader(TensorDataset(*stripes()), 16), recipe=recipe(seed=1))
    torch.testing.assert_close(streamed.model.state_dict(), counted.model.state_dict(), rtol=0, atol=0)


def test_labels_that_are_ignored_do_not_count_as_wrong() -> None:
    x, y = stripes()
    half = torch.where(torch.arange(96) % 2 == 0, y, 255)
    loss = nn.CrossEntropyLoss(ignore_index=255)
    result = hgnp.prune(made(), [(x, half)], [(x, half)], recipe=recipe(), loss=loss)
    with torch.no_grad():
        right = result.model.eval()(x).argmax(1) == y
    assert result.after.metric == pytest.approx(float(right[::2].float().mean()))


class _Tuple(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class _Dict(Net):
    def forward(self, x: Tensor) -> Any:
        return {"y": super().forward(x)}


def random_states(own: torch.Generator) -> list[Any]:
    numpy: Any = np.random.get_state()
    return [random.getstate(), numpy[1].tolist(), torch.get_rng_state().tolist(), own.get_state().tolist()]


def test_a_failed_start_leaves_network_folders_and_random_numbers_as_they_were(tmp_path: Path) -> None:
    net = made()
    before = copy.deepcopy(net.state_dict())
    x, y = stripes()
    own = torch.Generator().manual_seed(3)
    shuffled = DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True, generator=own)
    random_state = random_states(own)
    out = tmp_path / "new" / "run"
    for seed in (0, None):
        refused("got -1", net=net, train=[(x, y - 1)], out=out, recipe=recipe(seed=seed))
        refused("got 0.001", net=net, train=shuffled, out=out, recipe=recipe(keep=0.001, seed=seed))
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert net.training
    assert random_states(own) == random_state
    assert not list(tmp_path.iterdir())
    out.mkdir(parents=True)
    refused("got -1", net=net, train=[(x, y - 1)], out=out)
    assert out.is_dir()  # it is the user's


def test_numbers_that_are_not_finite_are_refused_before_training(tmp_path: Path) -> None:
    x, y = stripes()
    for wrong in (math.nan, math.inf):
        bad = x.clone()
        bad[5] = wrong
        for name in ("train", "val"):
            refused(
                f"the first batch of {name} must have finite inputs and a finite loss, got {wrong}",
                **{name: [(bad, y)]},
                out=tmp_path / "run",
            )
    net = made()
    with torch.no_grad():
        net.b.weight[0] = math.nan
    refused(r"net must have finite weights, got nan in b\.weight", net=net, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["hgnp", "l1"])
def test_a_loss_that_cannot_be_differentiated_is_refused(method: str) -> None:
    once = recipe(method=method)
    refused(
        "loss must be differentiable by the network's output, got a value without a gradient",
        loss=lambda o, t: F.cross_entropy(o.detach(), t),
        recipe=once,
    )
    refused(
        "loss must return a real number, got a complex one", loss=lambda o, t: F.cross_entropy(o, t) + 0j, recipe=once
    )


def test_a_network_on_meta_is_refused() -> None:
    net, batch = made().to("meta"), tuple(part.to("meta") for part in stripes())
    refused(r"a\.weight must be on a device with data, got meta", net=net)
    functions: list[Callable[[], Any]] = [
        lambda: hgnp.Neurons(net, batch[0]), lambda: hgnp.Flatness(net), lambda: hgnp.sharpness(net, [batch]),
        lambda: hgnp.recalibrate(net, [batch]), lambda: hgnp.export(net, "a.onnx", batch[0]),
    ]  # fmt: skip
    for function in functions:
        with pytest.raises(hgnp.HgnpError, match="must be on a device with data, got meta"):
            function()


def test_a_later_batch_that_does_not_fit_is_named() -> None:
    x, y = stripes()
    refused(r"net must take batch 1 of train, but its forward failed in a: ", train=[(x, y), (x.repeat(1, 2, 1, 1), y)])
    refused(r"net must return .* for train's labels of shape \(50,\)", train=[(x, y), (x, y[:50])])
    refused(
        r"net must take batch 2 of val, but its forward failed in a: ", val=[(x, y)] * 2 + [(x.repeat(1, 2, 1, 1), y)]
    )


def test_running_out_of_memory_is_not_taken_for_a_batch_that_does_not_fit() -> None:
    calls = 0

    def short_of_memory(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 6:
            raise torch.OutOfMemoryError("out of memory")
        return F.cross_entropy(output, target)

    with pytest.raises(torch.OutOfMemoryError, match=r"^out of memory$"):
        hgnp.prune(made(), *loaders(), recipe=recipe(method="taylor"), loss=short_of_memory)


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    hgnp.prune(made(), *loaders(), recipe=recipe(), out=tmp_path / "run")
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    refused("out must be a folder without a run, got", FileExistsError, out=tmp_path / "run")
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before


@pytest.mark.parametrize("method", ["hgnp", "taylor"])
def test_a_loss_that_is_not_finite_stops_the_run(method: str, tmp_path: Path) -> None:
    good = recipe(method=method, warmup_epochs=6)

    def explode(state: Any) -> None:
        if state.epoch == 1:
            with torch.no_grad():
                state.net.out.weight.mul_(math.inf)

    with pytest.raises(
        hgnp.DivergedError, match=r"the loss is nan in epoch 2, batch 0; the last good checkpoint is .*, after 2"
    ):
        hgnp.prune(made(), *loaders(), recipe=good, out=tmp_path / "run", on_epoch=explode)
    with pytest.raises(
        hgnp.DivergedError, match="there is no checkpoint, as out is not set; a smaller lr or mu may help"
    ):
        hgnp.prune(made(), *loaders(), recipe=recipe(method=method, lr=1e20))


@pytest.mark.usefixtures("capsys")
def test_a_disk_that_is_full_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    with full_disk() as fill:

        def on_epoch(state: Any) -> None:
            if state.epoch == 1:
                fill()

        with pytest.raises(OSError, match=r"^\S+ could not be written \(.*\); the last good checkpoint is \S+$"):
            hgnp.prune(made(), *loaders(), recipe=recipe(), out=tmp_path / "run", on_epoch=on_epoch)
    assert not [p for p in (tmp_path / "run").iterdir() if p.name.startswith(".")]
    result = hgnp.prune(made(), *loaders(), recipe=recipe(), out=tmp_path / "run", resume=True)
    assert (result.epochs, result.parts) == (len(result.history), 2)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    refused("out must be a folder that can be created, got ", OSError, out="/proc/nowhere/run")
    for name in ("", "a\0b"):
        refused("out must be the name of a file or folder, got", out=name)


@pytest.mark.parametrize("make", [lambda: nn.ReLU()])
def test_a_network_without_parameters_is_refused(make: Callable[[], nn.Module]) -> None:
    refused("net must have parameters", net=make())


# A run's folder


@pytest.fixture(scope="module")
def cut_short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended in its fourth epoch."""

    def stop(state: Any) -> None:
        if state.epoch == 3:
            raise StopError

    out = tmp_path_factory.mktemp("runs") / "cut"
    with pytest.raises(StopError):
        hgnp.prune(made(), *loaders(), recipe=recipe(), out=out, on_epoch=stop)
    return out


def resumed(message: str, out: Path, error: type[Exception] = ValueError, **given: Any) -> None:
    """Resuming is refused, and leaves network and folder as they were."""
    net = given.pop("net", None) or made()
    before = copy.deepcopy(net.state_dict())
    files = {file: file.read_bytes() for file in out.iterdir()}
    refused(message, error, net=net, out=out, resume=True, **given)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert net.a.out_channels == 12
    assert {file: file.read_bytes() for file in out.iterdir()} == files


def test_a_run_is_resumed_only_with_what_it_started_with(cut_short: Path) -> None:
    resumed(
        "resume: optimizer must be 'SGD' as when the run started, got 'AdamW'", cut_short, optimizer=torch.optim.AdamW
    )
    step = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    resumed("resume: scheduler must be None .*, got 'StepLR'", cut_short, scheduler=step)
    groups = lambda parameters: torch.optim.SGD([{"params": [p]} for p in parameters], lr=0.1)  # noqa: E731
    resumed("resume: parameter groups must be 1 .*, got 12", cut_short, optimizer=groups)
    resumed("resume: protect must be", cut_short, protect=["a"])
    resumed("resume: batches per epoch must be 4 .*, got 12", cut_short, train=loaders(batch=8)[0])
    other = DataLoader(TensorDataset(*stripes()), batch_size=24, generator=torch.Generator())
    resumed("train and val must have the generators and states of the resumed run's loaders", cut_short, train=other)
    resumed("resume: net must be as when the run started: state must be of .* size", cut_short, net=made(outputs=4))


def test_a_damaged_run_is_refused(cut_short: Path, tmp_path: Path) -> None:
    content = (cut_short / "checkpoint.safetensors").read_bytes()
    info = json.loads((cut_short / "run.json").read_text())
    for number, (name, changed, message) in enumerate(
        [
            (
                "checkpoint.safetensors",
                content[:-2000] + bytes([content[-2000] ^ 64]) + content[-1999:],
                "must be a checkpoint of hgnp, got a damaged or foreign file: its content must match its checksum",
            ),
            ("checkpoint.safetensors", content[:5000], "must be a safetensors file, but cannot be read"),
            ("run.json", b"[" * 100_000, "run.json must be JSON, got text that is not"),
            ("run.json", b"[]", "run.json must have a recipe, got none; the file is damaged"),
            ("run.json", json.dumps(info | {"format": 2}).encode(), "run.json: format must be 1, got 2"),
        ]
    ):
        out = tmp_path / str(number)
        shutil.copytree(cut_short, out)
        (out / name).write_bytes(changed)
        resumed(message, out)
    (out / "run.json").unlink()
    resumed("with metrics.jsonl and no run.json", out, FileExistsError)
    shutil.copytree(cut_short, tmp_path / "gone")
    (tmp_path / "gone/checkpoint.safetensors").unlink()
    resumed(
        "checkpoint.safetensors must exist to resume the run, got no such file", tmp_path / "gone", FileNotFoundError
    )


def test_a_finished_run_needs_no_checkpoint_but_a_whole_result(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = hgnp.prune(made(), *loaders(), recipe=recipe(), out=out)
    assert (out / "model.safetensors").stat().st_mode == (out / "run.json").stat().st_mode  # readable for others
    (out / "checkpoint.safetensors").unlink()
    again = hgnp.prune(made(), *loaders(), recipe=recipe(), out=out, resume=True)
    assert again.history == first.history
    (out / "result.json").write_text("{}")
    resumed("result.json must be a run's result, got another \\('before'\\)", out)


def test_files_that_are_not_a_runs_are_not_overwritten(tmp_path: Path) -> None:
    mine = hgnp.save(made(), tmp_path)
    content = mine.read_bytes()
    refused("with model.safetensors and no run.json", FileExistsError, out=tmp_path)
    assert mine.read_bytes() == content
    copied = mine.rename(tmp_path / "also-0.safetensors")
    net = made()
    refused(
        "with also-0.safetensors and no run.json", FileExistsError, net=net, out=tmp_path, also=[copy.deepcopy(net)]
    )
    assert copied.read_bytes() == content


def test_temporary_files_of_killed_writers_are_removed(cut_short: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(cut_short, out)
    for name in (".checkpoint.safetensors.abcd1234", ".mine.abcd1234"):
        (out / name).mkdir()
        (out / name / "checkpoint.safetensors").write_text("half")
    hgnp.prune(made(), *loaders(), recipe=recipe(), out=out, resume=True)
    assert [file.name for file in out.iterdir() if file.name.startswith(".")] == [".mine.abcd1234"]


def test_two_runs_in_one_folder_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hgnp.training.run_folder.LOCK_TIMEOUT", 0.2)
    refused: list[str] = []

    def second(state: Any) -> None:
        if state.epoch == 1:
            with pytest.raises(
                BlockingIOError, match=r"out must be a folder without a running process, got .*; choose another folder"
            ) as error:
                hgnp.prune(made(), *loaders(), recipe=recipe(), out=tmp_path, resume=True)
            refused.append(str(error.value))

    first = hgnp.prune(made(), *loaders(), recipe=recipe(), out=tmp_path, on_epoch=second)
    assert len(refused) == 1
    assert hgnp.prune(made(), *loaders(), recipe=recipe(), out=tmp_path, resume=True).history == first.history
    with pytest.raises(FileExistsError):  # the folder is unlocked after the refusal
        hgnp.prune(made(), *loaders(), recipe=recipe(), out=tmp_path)
    hgnp.prune(made(), *loaders(), recipe=recipe(), out=tmp_path, resume=True)
