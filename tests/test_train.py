"""`hgnp.prune`: Algorithm 2 through its public interface."""

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hgnp
from hgnp.recipe import METHODS
from hgnp.training.pruner import Pruner
from train_cases import STEPS, Net, loaders, made, recipe, stripes

KEYS = (
    "epoch phase loss penalty radius curvature active blocks val_loss metric kept parameters neurons macs removed widths "
    "lr mu seconds train_seconds"
)


def test_prune_returns_the_pruned_network_with_its_history_and_measurements(tmp_path: Path) -> None:
    net = made()
    result = hgnp.prune(net, *loaders(), recipe=recipe(measure="full"), out=tmp_path / "run")
    assert result.model is net
    assert result.reached
    assert 0.2 < result.kept <= 0.3
    assert result.kept == sum(p.numel() for p in net.parameters()) / sum(p.numel() for p in Net().parameters())
    assert result.after.metric is not None
    assert result.after.metric > 0.9
    assert [row["epoch"] for row in result.history] == list(range(result.epochs))
    assert all(set(row) == set(KEYS.split()) for row in result.history)
    assert result.before.neurons == 48
    assert result.after.neurons == sum(result.history[-1]["widths"].values())
    for facts in (result.before, result.after):
        assert facts.latency_ms is not None
        assert facts.sharpness is not None
        assert min(facts.latency_ms, facts.sharpness) > 0
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "run.json", "metrics.jsonl", "checkpoint.safetensors", "model.safetensors", "result.json"
    }  # fmt: skip
    x = stripes(7, seed=9)[0]
    result.save(tmp_path / "small")
    for folder in ("small", "run"):
        again = hgnp.load(tmp_path / folder, Net())
        assert torch.equal(again.eval()(x), net.eval()(x))
    assert "% of params kept, at most 30.00% requested; " in repr(result)


def test_progress_is_one_line_per_epoch_on_stderr_unless_silenced(capsys: pytest.CaptureFixture[str]) -> None:
    result = hgnp.prune(made(), *loaders(), recipe=recipe())
    shown = capsys.readouterr()
    opening, *lines = shown.err.splitlines()
    assert opening.startswith("Net: hgnp, ")
    assert [line.split()[:2] for line in lines] == [["epoch", str(row["epoch"])] for row in result.history]
    assert all(part in lines[0] for part in ("loss ", "accuracy ", "kept 100.0%", "radius ", " left"))
    assert shown.out == ""
    hgnp.prune(made(), *loaders(), recipe=recipe(), verbose=False)
    assert capsys.readouterr() == ("", "")


def test_a_run_equals_the_loop_one_would_write() -> None:
    """Algorithm 2 by hand, from the public parts."""
    r = recipe(mu=0.05, bound=0.0, keep=0.4, neurons_per_round=8)
    whole = made()
    hgnp.prune(whole, *loaders(), recipe=r)

    net = made()
    torch.manual_seed(0)
    train, _ = loaders()
    x, _ = next(iter(train))
    neurons = hgnp.Neurons(net, x[:2])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    flat = hgnp.Flatness(net, mu=0.05, bound=0.0)
    epoch, reached = 0, None
    while reached is None or epoch <= reached + 2:
        batches = list(train)
        if epoch >= 2 and reached is None:
            scores = hgnp.sensitivity(net, neurons, batches[:1], flatness=flat)
            n = 8
            while n > 1 and neurons.preview(neurons.least(scores, n - 1)).kept <= 0.4:
                n -= 1  # no more than the target needs
            neurons.remove(neurons.least(scores, n), optimizer)
            if neurons.kept <= 0.4:
                reached = epoch
        net.train()
        for batch, labels in batches:
            optimizer.zero_grad()
            flat.backward(batch, labels)
            optimizer.step()
        _ = list(loaders()[1])  # the validation loader draws a seed for workers too
        epoch += 1
    torch.testing.assert_close(net.state_dict(), whole.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(("warmup", "every", "first"), [(3, 2, 4), (2, 1, 2), (0, 3, 0)])
def test_rounds_follow_warmup_epochs_and_prune_every(warmup: int, every: int, first: int) -> None:
    r = recipe(warmup_epochs=warmup, prune_every=every, finetune_epochs=3, neurons_per_round=10)
    history = hgnp.prune(made(), *loaders(), recipe=r).history
    rounds = [row["epoch"] for row in history if row["removed"]]
    assert rounds == list(range(first, rounds[-1] + 1, every))
    assert len(history) == rounds[-1] + 1 + 3
    assert [row["phase"] for row in history] == (
        ["warmup"] * warmup + ["prune"] * (rounds[-1] + 1 - warmup) + ["finetune"] * 3
    )
    assert all(row["removed"] == 10 for row in history if row["epoch"] in rounds[:-1])


@pytest.mark.parametrize("target", ["params", "neurons", "macs"])
def test_the_run_ends_at_or_just_under_its_target(target: str) -> None:
    net = made()
    result = hgnp.prune(
        net, *loaders(), recipe=recipe(target=target, keep=0.35, neurons_per_round=9, finetune_epochs=0)
    )
    start, end = result.before, result.after
    got = {
        "params": end.parameters / start.parameters, "neurons": end.neurons / start.neurons, "macs": end.macs / start.macs
    }[target]  # fmt: skip
    assert result.target.got == pytest.approx(got)
    assert result.target.got <= 0.35
    # one neuron costs at most its row, its norm and its column
    one = {"params": 12 * 9 + 3 + 20, "neurons": 1, "macs": 36 * 9 + 9 * 9 * 16}[target]
    whole = {"params": start.parameters, "neurons": start.neurons, "macs": start.macs}[target]
    assert result.target.got > 0.35 - one / whole


def test_keep_1_removes_nothing() -> None:
    result = hgnp.prune(made(), *loaders(), recipe=recipe(keep=1.0, warmup_epochs=2, finetune_epochs=1))
    assert (result.epochs, result.kept, result.reached) == (3, 1.0, True)
    assert result.before.neurons == result.after.neurons == 48


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_the_same_loop(method: str) -> None:
    threshold = 0.6 if method == "hybrid" else None
    result = hgnp.prune(made(), *loaders(), recipe=recipe(method=method, threshold=threshold))
    assert result.reached
    assert result.after.metric is not None
    assert result.after.metric > 0.8
    penalized = [row["radius"] is not None for row in result.history]
    wanted = {"hgnp": [True] * len(penalized), "hybrid": [row["kept"] <= 0.6 for row in result.history]}
    assert penalized == wanted.get(method, [False] * len(penalized))


def test_methods_remove_different_neurons() -> None:
    cuts = {}
    for method in METHODS:
        net = made()
        hgnp.prune(
            net,
            *loaders(),
            recipe=recipe(
                method=method,
                threshold=0.8 if method == "hybrid" else None,
                warmup_epochs=1,
                finetune_epochs=0,
                keep=0.6,
                bound=0.0,
                mu=0.3,
            ),
        )
        cuts[method] = hash(tuple(net.out.weight.flatten().tolist()))
    assert len(set(cuts.values())) == len(METHODS)


def test_prune_unit_steps_removes_neurons_every_few_steps() -> None:
    r = recipe(method="taylor", prune_unit="steps", prune_every=2, neurons_per_round=1, keep=0.8, finetune_epochs=1)
    history = hgnp.prune(made(), *loaders(), recipe=r).history
    assert [row["removed"] for row in history[:2]] == [0, 0]
    assert history[2]["removed"] == STEPS / 2
    assert sum(row["removed"] for row in history) == 48 - history[-1]["neurons"]


@pytest.mark.parametrize("unit", ["epochs", "steps"])
def test_train_seconds_do_not_include_scoring(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of scoring is part of an epoch, not of its steps."""
    scored = Pruner.round

    def slow(self: Pruner, batches: list[Any]) -> int:
        time.sleep(0.5)
        return scored(self, batches)

    monkeypatch.setattr(Pruner, "round", slow)
    r = recipe(prune_unit=unit, prune_every=6 if unit == "steps" else 1, warmup_epochs=1, keep=0.8, finetune_epochs=0)
    for row in hgnp.prune(made(), *loaders(), recipe=r).history:
        rounds = 0.5 if row["phase"] == "prune" else 0.0
        assert 0 < row["train_seconds"] < row["seconds"] - rounds


def test_ablations_change_training_or_scores_alone() -> None:
    strong = {"bound": 0.0, "warmup_epochs": 1, "finetune_epochs": 0, "keep": 0.6}
    both = hgnp.prune(made(), *loaders(), recipe=recipe(mu=0.3, **strong)).history
    scores_alone = hgnp.prune(made(), *loaders(), recipe=recipe(mu=0.0, score_mu=0.3, **strong)).history
    training_alone = hgnp.prune(made(), *loaders(), recipe=recipe(mu=0.3, score_mu=0.0, **strong)).history
    plain = hgnp.prune(made(), *loaders(), recipe=recipe(method="taylor", **strong)).history
    assert both[0]["loss"] == training_alone[0]["loss"] != plain[0]["loss"] == scores_alone[0]["loss"]
    assert [row["widths"] for row in training_alone] != [row["widths"] for row in both]
    assert scores_alone[0]["penalty"] == 0.0
    assert scores_alone[0]["radius"] is None


def test_a_trained_net_is_pruned_at_once() -> None:
    net = made()
    hgnp.prune(net, *loaders(), recipe=recipe(keep=1.0, warmup_epochs=4, finetune_epochs=0))
    r = recipe(warmup_epochs=0, neurons_per_round=48, finetune_epochs=0, keep=0.5)
    result = hgnp.prune(net, *loaders(), recipe=r)
    assert result.epochs == 1
    assert result.before.metric is not None
    assert result.before.metric > 0.9
    assert result.kept <= 0.5


def test_a_trained_net_without_training() -> None:
    """As in the README."""
    net = made()
    hgnp.prune(net, *loaders(), recipe=recipe(keep=1.0, warmup_epochs=4, finetune_epochs=0))
    x, y = stripes()
    neurons = hgnp.Neurons(net, x[:2])
    cut = neurons.least(hgnp.sensitivity(net, neurons, [(x, y)]), n=neurons.count // 4)
    before = copy.deepcopy(net.state_dict())
    preview = neurons.preview(cut)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    neurons.remove(cut)
    assert preview.parameters == sum(p.numel() for p in net.parameters())
    assert (net.eval()(x).argmax(1) == y).float().mean() > 0.9


# Other tasks and data


def test_regression_has_minus_the_validation_loss_as_metric() -> None:
    x, _ = stripes()
    y = torch.stack([x.mean((1, 2, 3)), x.amax((1, 2, 3))], 1)
    data = [(x[i : i + 16], y[i : i + 16]) for i in range(0, 96, 16)]
    result = hgnp.prune(made(outputs=2), data, data, recipe=recipe(mu=0.01), loss=F.mse_loss)
    assert result.metric == "-loss"
    assert result.after.metric == pytest.approx(-result.history[-1]["val_loss"])
    assert result.history[-1]["loss"] < result.history[0]["loss"]


def test_multi_label_targets_and_a_metric_over_the_whole_set() -> None:
    x, y = stripes()
    labels = F.one_hot(y, 3).double().float()
    data = [(x[i : i + 16], labels[i : i + 16]) for i in range(0, 96, 16)]
    sizes = []

    def f1(output: Tensor, target: Tensor) -> float:
        sizes.append(len(output))
        found = output > 0
        return float(2 * (found & (target > 0)).sum() / (found.sum() + target.sum()))

    result = hgnp.prune(
        made(), data, data, recipe=recipe(finetune_epochs=4), loss=F.binary_cross_entropy_with_logits, metric=f1
    )
    assert sizes[0] == 16  # tried on a batch before any training
    assert set(sizes[1:]) == {96}
    assert result.metric == "f1"
    assert result.after.metric is not None
    assert result.after.metric > 0.8


def test_batches_that_are_mappings_and_outputs_that_are_objects() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, pixels: Tensor, scale: Tensor) -> Any:
            return {"logits": self.net(pixels * scale.view(-1, 1, 1, 1))}

    x, y = stripes()
    data = [{"pixels": x[i : i + 16], "scale": torch.ones(16), "labels": y[i : i + 16]} for i in range(0, 96, 16)]
    result = hgnp.prune(Wrapped(), data, data, recipe=recipe(), output=lambda o: o["logits"], protect=["net.a"])
    assert result.history[-1]["widths"].keys() == {"net.b", "net.c"}


def test_own_unpack_and_no_validation() -> None:
    x, y = stripes()
    data = [(y[i : i + 16], x[i : i + 16], "extra") for i in range(0, 96, 16)]
    result = hgnp.prune(made(), data, recipe=recipe(), unpack=lambda b: (b[1], b[0]))
    assert result.after.metric is None
    assert result.history[0]["val_loss"] is None


def test_on_epoch_stops_a_run(tmp_path: Path) -> None:
    seen = []

    def stop(state: Any) -> bool:
        seen.append((state.epoch, len(state.history), state.row["loss"]))
        return state.epoch == 1

    result = hgnp.prune(made(), *loaders(), recipe=recipe(), on_epoch=stop, out=tmp_path / "run")
    assert [epoch for epoch, _, _ in seen] == [0, 1]
    assert result.stopped == "on_epoch stopped the run after epoch 1"
    assert not result.reached
    assert "misses" in repr(result)


def test_a_run_restores_the_modules_training_modes() -> None:
    net = made().eval()
    hgnp.prune(net, *loaders(), recipe=recipe())
    assert not any(module.training for module in net.modules())
