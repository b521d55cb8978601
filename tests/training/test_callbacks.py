"""`on_step`, `on_epoch` and `also`: what callbacks see, how they stop a run, and networks that are pruned along."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hgnp
from train_cases import STEPS, StopError, loaders, made, recipe, stripes


def average(copied: nn.Module, net: nn.Module, decay: float = 0.9) -> None:
    """One step of an exponential moving average."""
    with torch.no_grad():
        for mine, new in zip(copied.state_dict().values(), net.state_dict().values(), strict=True):
            mine.copy_(decay * mine + (1 - decay) * new)


def shapes(net: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in net.state_dict().items()}


def test_on_step_sees_every_step_of_the_run() -> None:
    net, seen, rows = made(), [], []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    def on_step(state: Any) -> None:
        assert state.net is net
        assert state.optimizer is optimizer
        assert state.row == {}
        assert len(state.history) == state.epoch
        assert state.neurons.kept == sum(p.numel() for p in net.parameters()) / 2323
        seen.append((state.epoch, state.step, state.flatness.radius, state.flatness.curvature, state.flatness.mu))

    def on_epoch(state: Any) -> None:
        assert state.step is None
        assert state.history[-1] is state.row
        assert state.neurons.net is state.flatness.net is state.net is net
        assert state.optimizer is optimizer
        rows.append(state.row)

    result = hgnp.prune(
        net, *loaders(), recipe=recipe(mu=0.01, bound=0.0), optimizer=optimizer, on_step=on_step, on_epoch=on_epoch
    )
    assert [entry[:2] for entry in seen] == [(e, s) for e in range(result.epochs) for s in range(STEPS)]
    assert rows == result.history
    for row in rows[1:]:  # the first step of all has no direction yet
        own = [entry for entry in seen if entry[0] == row["epoch"]]
        assert sum(entry[2] for entry in own) / STEPS == pytest.approx(row["radius"], rel=1e-12)
        assert sum(entry[3] for entry in own) / STEPS == pytest.approx(row["curvature"], rel=1e-12)
        assert {entry[4] for entry in own} == {0.01}


def test_flatness_is_unknown_to_callbacks_of_methods_without_the_penalty() -> None:
    for method in ("taylor", "sam"):
        seen: list[Any] = []
        r = recipe(keep=1.0, method=method, warmup_epochs=1, finetune_epochs=0)
        hgnp.prune(made(), *loaders(), recipe=r, on_step=lambda state, seen=seen: seen.append(state.flatness))
        assert all(math.isnan(flat.radius) and flat.block is None for flat in seen)


def test_callbacks_that_only_read_do_not_change_a_run() -> None:
    def read(state: Any) -> str:
        return f"{state.flatness} {state.flatness.radius} {state.neurons.layers}"

    r = recipe(mu=0.01, bound=0.0)
    with_, without = hgnp.prune(made(), *loaders(), recipe=r, on_step=read), hgnp.prune(made(), *loaders(), recipe=r)
    torch.testing.assert_close(with_.model.state_dict(), without.model.state_dict(), rtol=0, atol=0)


def test_on_step_stops_a_run_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    steps: list[int] = []

    def stop(state: Any) -> bool:
        steps.append(state.step)
        return state.epoch == 1 and state.step == 2

    result = hgnp.prune(made(), *loaders(), recipe=recipe(), on_step=stop, out=tmp_path / "run")
    assert steps == [*range(STEPS), 0, 1, 2]
    assert result.stopped == "on_step stopped the run in epoch 1, step 2"
    assert (result.epochs, result.reached) == (2, False)
    assert result.history[1]["metric"] is not None  # the partial epoch is validated too
    again = hgnp.prune(made(), *loaders(), recipe=recipe(), out=tmp_path / "run", resume=True)
    assert again.history == result.history


@pytest.mark.parametrize("coupling", ["coupled", "paper"])
def test_an_ema_copy_loses_the_same_neurons(coupling: str) -> None:
    net = made()
    ema = copy.deepcopy(net)
    r = recipe(coupling=coupling)
    result = hgnp.prune(net, *loaders(), recipe=r, also=[ema], on_step=lambda state: average(ema, state.net))
    assert result.kept <= 0.3
    assert shapes(ema) == shapes(net)
    x, y = stripes(60, seed=2)
    assert (ema.eval()(x).argmax(1) == y).double().mean() > 0.9
    assert not torch.equal(ema.out.weight, net.out.weight)


def test_a_copy_with_the_weights_of_the_network_keeps_them_through_removals() -> None:
    """A copy that is set to the network after every step is, after each removal, still the network."""
    net, differences = made(), []
    twin = copy.deepcopy(net)

    def on_step(state: Any) -> None:
        average(twin, state.net, decay=0.0)

    def on_epoch(state: Any) -> None:
        differences.append(all(torch.equal(a, b) for a, b in zip(twin.parameters(), net.parameters(), strict=True)))

    hgnp.prune(net, *loaders(), recipe=recipe(), also=(twin,), on_step=on_step, on_epoch=on_epoch)
    assert all(differences)
    before = copy.deepcopy(net), copy.deepcopy(twin)
    more = recipe(keep=0.2, warmup_epochs=0, finetune_epochs=0, neurons_per_round=48, lr=1e-30, weight_decay=0.0)
    hgnp.prune(net, *loaders(), recipe=more, also=[twin])  # without on_step: the twin is only cut
    assert shapes(twin) == shapes(net) != shapes(before[0])
    for mine, other in zip(twin.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("coupling", ["coupled", "paper"])
def test_networks_in_also_are_resumed_and_loaded_with_the_run(coupling: str, tmp_path: Path) -> None:
    r = recipe(coupling=coupling)

    def run(out: Path, last: int | None = None) -> nn.Module:
        net = made()
        ema = copy.deepcopy(net)

        def on_epoch(state: Any) -> None:
            if state.epoch == last:
                raise StopError

        hgnp.prune(
            net, *loaders(), recipe=r, also=[ema], out=out, resume=True, on_epoch=on_epoch,
            on_step=lambda state: average(ema, state.net),
        )  # fmt: skip
        return ema

    whole = run(tmp_path / "whole")
    with pytest.raises(StopError):
        run(tmp_path / "pieces", last=4)
    with pytest.raises(ValueError, match="resume: networks in also must be 1 as when the run started, got 0"):
        hgnp.prune(made(), *loaders(), recipe=r, out=tmp_path / "pieces", resume=True)
    torch.testing.assert_close(run(tmp_path / "pieces").state_dict(), whole.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(run(tmp_path / "pieces").state_dict(), whole.state_dict(), rtol=0, atol=0)  # finished
    saved = hgnp.load(tmp_path / "pieces" / "also-0.safetensors", made())
    torch.testing.assert_close(saved.state_dict(), whole.state_dict(), rtol=0, atol=0)
    for also in ([], [made(), made()]):
        with pytest.raises(ValueError, match="resume: also must have as many networks"):
            hgnp.prune(made(), *loaders(), recipe=r, also=also, out=tmp_path / "pieces", resume=True)


def test_snapshots_are_of_the_network_alone(tmp_path: Path) -> None:
    results = []
    for also, out in (((), "without"), ([made()], "with")):
        r = recipe(keep=0.3, snapshots=(0.6,), finetune_epochs=1)
        results.append(hgnp.prune(made(), *loaders(), recipe=r, also=also, out=tmp_path / out).snapshots[0])
    assert (results[0].metric, results[0].val_loss) == (results[1].metric, results[1].val_loss)


def test_a_network_of_another_shape_is_refused() -> None:
    net = made()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match=r"also\[0\].*out.weight"):
        hgnp.prune(net, *loaders(), recipe=recipe(), also=[made(outputs=4)])
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("method", ["taylor", "hgnp"])
def test_a_batch_whose_labels_are_all_ignored_is_named_as_the_cause_of_a_nan_loss(method: str) -> None:
    x, y = stripes()
    batches = [(x[:32], y[:32]), (x[32:64], torch.full((32,), -100)), (x[64:], y[64:])]
    with pytest.raises(hgnp.DivergedError) as caught:
        hgnp.prune(made(), batches, recipe=recipe(method=method))
    assert str(caught.value) == (
        "the loss is nan in epoch 0, batch 1; there is no checkpoint, as out is not set; all weights are finite; leave out "
        "batches in which every label is ignored (ignore_index=-100)"
    )


@pytest.mark.parametrize("heading", ["An EMA copy", "Distillation"])
def test_the_code_in_the_documentation_runs(heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs/training.md").read_text(encoding="utf-8")
    code = text.split(f"### {heading}\n")[1].split("```python\n")[1].split("```")[0]
    net, (train_loader, val_loader) = made(), loaders()
    given = {"net": net, "train_loader": train_loader, "val_loader": val_loader, "recipe": recipe(bound=0.0)}
    exec(code, given)  # noqa: S102  the repository's own text
    assert sum(p.numel() for p in net.parameters()) <= 0.3 * 2323
    if heading == "An EMA copy":
        ema = hgnp.load(tmp_path / "ema", made(7))
        assert shapes(ema) == shapes(net)
        assert not torch.equal(ema.out.weight, net.out.weight)
    else:
        teacher: Any = given["teacher"]
        assert shapes(teacher) == shapes(made())
        x, y = stripes(12)
        soft = F.softmax(teacher(x) / 4, 1)
        loss: Any = given["distillation"]
        torch.testing.assert_close(
            loss(teacher(x), (y, soft)), 0.5 * F.cross_entropy(teacher(x), y)
        )  # no divergence from itself


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_learning_rate_that_a_callback_sets_scales_the_rest_of_the_schedule(schedule: str) -> None:
    def change(state: Any) -> None:
        if state.epoch == 1:
            state.optimizer.param_groups[0]["lr"] *= 0.25

    def used(change: Any) -> list[float]:
        seen: list[float] = []
        hgnp.prune(
            made(), *loaders(), recipe=recipe(method="taylor", schedule=schedule), on_epoch=change,
            on_step=lambda state: seen.append(state.optimizer.param_groups[0]["lr"]),
        )  # fmt: skip
        return seen

    plain, changed = used(None), used(change)
    assert changed[: 2 * STEPS] == plain[: 2 * STEPS]
    assert changed[2 * STEPS :] == pytest.approx([0.25 * lr for lr in plain[2 * STEPS :]])


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_parameter_group_that_a_callback_adds_is_trained_and_resumed(schedule: str, tmp_path: Path) -> None:
    def first(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(parameters)[2:], lr=0.05, momentum=0.9)

    def both(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        return torch.optim.SGD(
            [{"params": parameters[2:]}, {"params": parameters[:2], "lr": 0.01}], lr=0.05, momentum=0.9
        )

    def unfreeze(state: Any) -> None:
        if state.epoch == 0:
            state.optimizer.add_param_group({"params": list(state.net.parameters())[:2], "lr": 0.01})
        if state.epoch == stop:
            raise StopError

    def run(out: Path | None = None, *, resume: bool = False) -> tuple[nn.Module, hgnp.Result]:
        net = made()
        return net, hgnp.prune(
            net, *loaders(), recipe=recipe(method="taylor", schedule=schedule), on_epoch=unfreeze,
            optimizer=both if resume else first, out=out, resume=resume,
        )  # fmt: skip

    stop = -1
    whole, _ = run()
    stop = 2
    with pytest.raises(StopError):
        run(tmp_path / "run")
    stop = -1
    with pytest.raises(ValueError, match="resume: parameter groups must be 2"):
        hgnp.prune(
            made(), *loaders(), recipe=recipe(method="taylor", schedule=schedule), optimizer=first, out=tmp_path / "run",
            resume=True,
        )  # fmt: skip
    resumed, _ = run(tmp_path / "run", resume=True)
    for mine, its in zip(resumed.state_dict().values(), whole.state_dict().values(), strict=True):
        assert torch.equal(mine, its)


def test_a_callback_that_replaces_a_parameter_is_refused() -> None:
    def replace(state: Any) -> None:
        state.net.b.weight = nn.Parameter(state.net.b.weight.detach().clone())

    with pytest.raises(
        ValueError, match=r"optimizer must hold .*; a callback must leave the network's parameters in place"
    ):
        hgnp.prune(made(), *loaders(), recipe=recipe(), on_epoch=replace)


def test_a_callback_adds_numbers_to_a_row_but_no_tensors(tmp_path: Path) -> None:
    def add(value: Any) -> Any:
        return lambda state: state.row.update(mine=value)

    result = hgnp.prune(made(), *loaders(), recipe=recipe(), on_epoch=add(3.0), out=tmp_path / "number")
    assert {row["mine"] for row in result.history} == {3.0}
    with pytest.raises(TypeError, match=r"row must hold numbers, .*, got Tensor as 'mine' .* by tensor\.item\(\)"):
        hgnp.prune(made(), *loaders(), recipe=recipe(), on_epoch=add(torch.tensor(3.0)), out=tmp_path / "tensor")
