"""One epoch of training: Algorithm 1 step by step, with learning rate, precision and clipping, and what was seen on the way."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hgnp.baselines import SAM
from hgnp.flatness import Flatness
from hgnp.recipe import Recipe
from hgnp.training.batches import Ahead
from hgnp.training.engine import Engine

CHECK_EVERY = 32  # steps; a look at the losses waits for the device
SHOW_EVERY = 0.2  # seconds


class DivergedError(ArithmeticError):
    """The loss is no longer a finite number."""


@dataclass
class Steps:
    """What an epoch's steps showed, kept on the device until the end."""

    losses: list[Tensor] = field(default_factory=list)
    radii: list[Tensor] = field(default_factory=list)
    curvatures: list[Tensor] = field(default_factory=list)
    mus: list[float] = field(default_factory=list)
    blocks: Counter[str] = field(default_factory=Counter)
    rested: int = 0
    """Steps in which the term rested."""
    checked: int = 0
    seconds: float = 0.0
    """Of the steps alone: what is done before a step, such as a round of pruning, is not counted."""

    def summary(self, bound: float) -> dict[str, Any]:
        steps = len(self.losses)
        row: dict[str, Any] = {"loss": _mean(self.losses), "train_seconds": self.seconds}
        if not self.curvatures:
            active = 0.0 if self.rested else None
            return row | {"penalty": 0.0, "radius": None, "curvature": None, "active": active, "blocks": {}}
        q = torch.stack([value.double() for value in self.curvatures]).cpu()
        mu = torch.tensor(self.mus, dtype=torch.double)
        return row | {
            "penalty": float((mu * (q - bound).clamp_min(0)).sum() / steps),
            "radius": _mean(self.radii),
            "curvature": float(q.mean()),
            "active": float((q > bound).double().sum() / (len(q) + self.rested)),
            "blocks": {name: count / (len(q) + self.rested) for name, count in self.blocks.most_common()},
        }


def _mean(values: list[Tensor]) -> float:
    return float(torch.stack([value.double() for value in values]).mean())


def precision_on(recipe: Recipe, device: torch.device) -> str:
    """The recipe's precision, where "auto" depends on the device."""
    if recipe.precision != "auto":
        return recipe.precision
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"


class Epochs:
    """Trains `net` for an epoch at a time. `trainer.backward` leaves the gradient: Flatness, or SAM."""

    def __init__(
        self,
        net: nn.Module,
        trainer: Flatness | SAM,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        device: torch.device,
    ) -> None:
        self.net, self.trainer, self.optimizer, self.recipe, self.device = net, trainer, optimizer, recipe, device
        self.flatness = trainer if isinstance(trainer, Flatness) else None
        self.precision = precision_on(recipe, device)
        self.engine: Engine | None = None
        if device.type == "cuda" and recipe.execution != "eager" and self.precision != "fp16":
            self.engine = Engine(trainer, self._precision)
        self.peaks = [float(group["lr"]) for group in optimizer.param_groups]
        """The learning rates that a schedule scales."""
        self.scaler = torch.amp.GradScaler(device.type) if self.precision == "fp16" else None

    def running(self) -> AbstractContextManager[None]:
        """Around steps, and best around all that is done with the network between them: with graphs, one stream for it all."""
        return nullcontext() if self.engine is None else self.engine.running()

    def train(
        self,
        batches: Iterable[tuple[Any, Any]],
        *,
        steps: int | None,
        epoch: int,
        rate: Callable[[float], float] | None,
        mu: Callable[[float], float],
        before_step: Callable[[tuple[Any, Any]], None],
        show: Callable[[int, float | None], None],
    ) -> Steps:
        """One pass over `batches`. `rate` and `mu` say how they go over the epoch, from 0 to 1."""
        self.net.train()
        ahead = Ahead(batches)
        if self.engine is not None:
            self.engine.begin_epoch()
        seen = Steps()
        start = shown = time.perf_counter()
        with self.running(), self._fetching(ahead):
            for step, batch in enumerate(ahead):
                share = step / steps if steps else 0.0
                paused = time.perf_counter()
                before_step(batch)
                start += time.perf_counter() - paused
                if rate is not None:
                    for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
                        group["lr"] = peak * rate(share)
                if self.flatness is not None:
                    self.flatness.mu = mu(share)
                self.step(batch, seen)
                if (step + 1) % CHECK_EVERY == 0:
                    self._check(seen, epoch)
                if time.perf_counter() - shown > SHOW_EVERY:
                    shown = time.perf_counter()
                    show(step + 1, float(seen.losses[seen.checked - 1]) if seen.checked else None)
            self._check(seen, epoch)
        seen.seconds = time.perf_counter() - start
        return seen

    @contextmanager
    def _fetching(self, ahead: Ahead) -> Iterator[None]:
        """Batches are fetched before a step waits for the device."""
        if self.engine is not None:
            self.engine.fetch = ahead.fetch
        try:
            yield
        finally:
            if self.engine is not None:
                self.engine.fetch = None

    def step(self, batch: tuple[Any, Any], seen: Steps) -> None:
        if self.engine is None:
            self.net.zero_grad(set_to_none=True)  # also what the optimizer does not train: clipping sees it
        scale: float | Tensor = 1.0
        if self.scaler is not None:
            scale = self.scaler.scale(torch.ones((), device=self.device))
        try:
            if self.engine is not None:
                loss = self.engine.backward(batch[0], batch[1], scale=scale)
            else:
                with self._precision():
                    loss = self.trainer.backward(batch[0], batch[1], scale=scale)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise ValueError(
                f"train: batch {len(seen.losses)} has a single sample, which a batch norm cannot learn from; "
                "drop_last=True or another batch size would do"
            ) from error
        seen.losses.append(loss)
        flat = self.flatness
        if flat is not None and flat.mu > 0 and flat.rested:
            seen.rested += 1
        elif flat is not None and flat.mu > 0 and flat.seen is not None:
            seen.radii.append(flat.seen.radius)
            seen.curvatures.append(flat.seen.curvature)
            seen.mus.append(flat.mu)
            seen.blocks[flat.seen.block.name] += 1
        if self.recipe.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.net.parameters(), self.recipe.clip_norm)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.engine is not None:
            self.engine.step(self.optimizer)
        else:
            self.optimizer.step()

    def _precision(self) -> AbstractContextManager[Any]:
        if self.precision == "float32":
            return nullcontext()
        half = torch.bfloat16 if self.precision == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype=half)

    def _check(self, seen: Steps, epoch: int) -> None:
        if seen.checked == len(seen.losses):
            return
        values = torch.stack([loss.double() for loss in seen.losses[seen.checked :]]).tolist()
        for offset, value in enumerate(values):
            if not math.isfinite(value):
                raise DivergedError(f"the loss is {value} in epoch {epoch}, step {seen.checked + offset}")
        seen.checked = len(seen.losses)
