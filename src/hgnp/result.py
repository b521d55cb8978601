"""What a run comes to."""

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from hgnp.io.weights import save
from hgnp.recipe import Recipe

Row = dict[str, Any]
"""A line of metrics.jsonl; docs/runs.md lists its keys."""


@dataclass(frozen=True)
class Facts:
    """What is known of a network; None where it was not or could not be measured."""

    metric: float | None
    loss: float | None
    """On the validation data."""
    parameters: int
    neurons: int
    """Those that can be removed."""
    macs: int
    """Of one sample."""
    sharpness: float | None = None
    """The largest eigenvalue of the Hessian, on a few validation samples."""
    latency_ms: float | None = None
    """Of a batch, timed in turns with the other network."""
    missing: dict[str, str] = field(default_factory=dict)
    """Why `sharpness` or `latency_ms` is None, by its name."""


@dataclass(frozen=True)
class Target:
    kind: str
    """"params", "neurons" or "macs"."""
    asked: float
    got: float


@dataclass(frozen=True)
class Snapshot:
    """The network at an intermediate κ, fine-tuned by itself."""

    asked: float
    """The value of `recipe.snapshots`."""
    got: float
    """The fraction of what the target counts that is really left: a round may go below the value."""
    kept: float
    """Parameters left, as a fraction of those at the start."""
    metric: float | None
    val_loss: float | None
    parameters: int
    neurons: int
    macs: int
    """Of one sample."""
    epoch: int
    """The epoch at whose end the network was copied."""
    epochs: int
    """Of fine-tuning."""
    path: Path | None = None
    """Its folder, for `hgnp.load`; a run of several values in one round has one folder for them. None without `out`."""
    model: nn.Module | None = None
    """The network, if there is no folder."""

    def as_dict(self, out: Path | None) -> dict[str, Any]:
        """In types that JSON has; `path` as seen from the run's folder."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "model"}
        return values | {"path": None if self.path is None or out is None else self.path.relative_to(out).as_posix()}


@dataclass(frozen=True)
class Result:
    """The pruned network and everything one wants to know about it."""

    model: nn.Module
    """The network that was given, pruned in place."""
    history: list[Row]
    """A row an epoch: loss, penalty, radius, curvature, metric, kept, neurons, lr, seconds and more."""
    recipe: Recipe
    before: Facts
    """When the first neuron went: after the warm-up, at full size."""
    after: Facts
    target: Target
    metric: str
    """The metric's name."""
    latency: dict[str, Any] | None
    """How `latency_ms` was measured: batch, threads, device."""
    seconds: float
    parts: int = 1
    """One, and one more for each time the run was resumed."""
    stopped: str | None = None
    """Why the run ended before its target, if it did."""
    out: Path | None = None
    snapshots: tuple[Snapshot, ...] = ()
    """One for each value of `recipe.snapshots` that the run came down to, from large κ to small."""

    @property
    def reached(self) -> bool:
        """Whether the target was met."""
        return self.target.got <= self.target.asked

    @property
    def epochs(self) -> int:
        return len(self.history)

    @property
    def kept(self) -> float:
        """Parameters left, as a fraction of those at the start."""
        return float(self.history[-1]["kept"]) if self.history else 1.0

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the pruned network; `hgnp.load(path, MyNet())` brings it back."""
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
        verb = "asked for at most" if self.reached else "which misses"
        return (
            f"Result({metric}{t.got:.2%} of {t.kind} left, {verb} {t.asked:.2%}; "
            f"{self.before.neurons} → {self.after.neurons} neurons in {self.epochs} epochs)"
        )
