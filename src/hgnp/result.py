"""The result of a run."""

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from hgnp.io.weights import save
from hgnp.recipe import Quantity, Recipe

Row = dict[str, Any]
"""One row of the history, a line of metrics.jsonl; docs/runs.md lists its keys."""


@dataclass(frozen=True)
class NetworkStats:
    """Measurements of one network.

    Attributes:
        metric: On the validation data; None without such data.
        loss: On the validation data; None without such data.
        parameters: Number of parameters.
        neurons: Number of neurons that can be removed.
        macs: Multiply–accumulate operations per sample.
        sharpness: The largest eigenvalue of the Hessian on up to 128 samples; None if it was not measured.
        latency_ms: Milliseconds per batch, timed alternately with the other network; None if it was not measured.
        missing: Why `sharpness` or `latency_ms` is None: name → reason.
    """

    metric: float | None
    loss: float | None
    parameters: int
    neurons: int
    macs: int
    sharpness: float | None = None
    latency_ms: float | None = None
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """The target of a run, and what it achieved.

    Attributes:
        kind: The quantity: "params", "neurons" or "macs".
        asked: The fraction to keep, `recipe.keep`.
        got: The fraction that is left.
    """

    kind: Quantity
    asked: float
    got: float


@dataclass(frozen=True)
class Snapshot:
    """The network at an intermediate κ, fine-tuned separately.

    Attributes:
        asked: The value of `recipe.snapshots`.
        got: The fraction of the target's quantity that is left, at most `asked`.
        kept: Parameters left, as a fraction of those at the start.
        metric: On the validation data; None without such data.
        val_loss: On the validation data; None without such data.
        parameters: Number of parameters.
        neurons: Number of neurons that can be removed.
        macs: Multiply–accumulate operations per sample.
        epoch: The epoch of the round that reached it.
        epochs: Epochs of fine-tuning.
        path: Its folder, for `hgnp.load`; None without `out`.
        model: The network, if there is no folder.
    """

    asked: float
    got: float
    kept: float
    metric: float | None
    val_loss: float | None
    parameters: int
    neurons: int
    macs: int
    epoch: int
    epochs: int
    path: Path | None = None
    model: nn.Module | None = None

    def as_dict(self, out: Path | None) -> dict[str, Any]:
        """In types that JSON can hold; `path` relative to the run's folder."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "model"}
        return values | {"path": None if self.path is None or out is None else self.path.relative_to(out).as_posix()}


@dataclass(frozen=True)
class Result:
    """The pruned network, its history, and measurements before and after.

    >>> import torch, hgnp
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> batches = [(torch.randn(16, 4), torch.arange(16) % 2)]  # or a DataLoader
    >>> recipe = hgnp.Recipe(keep=0.5, warmup_epochs=1, neurons_per_round=4, finetune_epochs=1, seed=0)
    >>> result = hgnp.prune(net, batches, batches, recipe=recipe, verbose=False)
    >>> result.reached, result.before.neurons, result.after.neurons
    (True, 8, 3)
    >>> result.save("small/").as_posix()
    'small/model.safetensors'

    Attributes:
        model: The network that `prune` was called with, pruned in place.
        history: One row per epoch: loss, penalty, radius, curvature, metric, kept, neurons, lr, seconds and more.
        recipe: The recipe, with the defaults that depend on other settings filled in.
        before: The network after the warm-up, before the first removal.
        after: The network at the end.
        target: The target, and what is left.
        metric: Name of the metric.
        latency: How `latency_ms` was measured: batch, threads, device, repeats; None if it was not.
        seconds: Time of all epochs.
        parts: 1, plus one for each time the run was resumed.
        stopped: Why the run ended early, if it did.
        out: The run's folder, if it has one.
        snapshots: One for each value of `recipe.snapshots` that the run reached, from large κ to small.
    """

    model: nn.Module
    history: list[Row]
    recipe: Recipe
    before: NetworkStats
    after: NetworkStats
    target: Target
    metric: str
    latency: dict[str, Any] | None
    seconds: float
    parts: int = 1
    stopped: str | None = None
    out: Path | None = None
    snapshots: tuple[Snapshot, ...] = ()

    @property
    def reached(self) -> bool:
        """Whether the target was met."""
        return self.target.got <= self.target.asked

    @property
    def epochs(self) -> int:
        """Number of epochs."""
        return len(self.history)

    @property
    def kept(self) -> float:
        """Parameters left, as a fraction of those at the start."""
        return float(self.history[-1]["kept"]) if self.history else 1.0

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Save the pruned network; `hgnp.load(path, MyNet())` loads it."""
        return save(self.model, path)

    def as_dict(self) -> dict[str, Any]:
        """The content of result.json."""
        return {
            "reached": self.reached,
            "target": dataclasses.asdict(self.target),
            "stopped": self.stopped,
            "epochs": self.epochs,
            "seconds": self.seconds,
            "parts": self.parts,
            "metric": self.metric,
            "before": dataclasses.asdict(self.before),
            "after": dataclasses.asdict(self.after),
            "latency": self.latency,
            "snapshots": [snapshot.as_dict(self.out) for snapshot in self.snapshots],
        }

    def __repr__(self) -> str:
        t = self.target
        metric = "" if self.after.metric is None else f"{self.metric} {self.after.metric:.4g}, "
        against = "at most" if self.reached else "which misses"
        return (
            f"Result({metric}{t.got:.2%} of {t.kind} kept, {against} {t.asked:.2%} requested; "
            f"{self.before.neurons} → {self.after.neurons} neurons in {self.epochs} epochs)"
        )
