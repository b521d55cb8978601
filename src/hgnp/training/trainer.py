"""One epoch of training: Algorithm 1 step by step, with learning rate, precision and clipping, and the epoch's statistics."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hgnp.curvature.batch_checks import explain_failure
from hgnp.curvature.sam import SAMStep
from hgnp.curvature.step import State, Step, make_step
from hgnp.errors import DivergedError, HgnpError, InputError, is_too_few_values
from hgnp.execution.executor import make_executor
from hgnp.recipe import Recipe
from hgnp.reducer import LOCAL, Reducer
from hgnp.state_guards import preserve_modes
from hgnp.training.data import Prefetcher
from hgnp.training.task import Task

CHECK_EVERY = 32  # batches; reading the losses waits for the device
SHOW_EVERY = 0.2  # seconds


@dataclass
class EpochStatistics:
    """Statistics of an epoch's steps, kept on the device until the end."""

    losses: list[Tensor] = field(default_factory=list)
    radii: list[Tensor] = field(default_factory=list)
    curvatures: list[Tensor] = field(default_factory=list)
    mus: list[float] = field(default_factory=list)
    blocks: Counter[str] = field(default_factory=Counter)
    skipped: int = 0
    """Steps that skipped the penalty, as it was inactive along this v."""
    checked: int = 0
    seconds: float = 0.0
    """Of the steps alone: what is done before a step, such as a round of pruning, is not counted."""

    def summary(self, bound: float) -> dict[str, Any]:
        steps = len(self.losses)
        row: dict[str, Any] = {"loss": _mean(self.losses), "train_seconds": self.seconds}
        if not self.curvatures:
            active = 0.0 if self.skipped else None
            return row | {"penalty": 0.0, "radius": None, "curvature": None, "active": active, "blocks": {}}
        q = torch.stack([value.double() for value in self.curvatures]).cpu()
        mu = torch.tensor(self.mus, dtype=torch.double)
        penalties = mu * (q - bound).clamp_min(0)
        return row | {
            "penalty": float(penalties[penalties.isfinite()].sum() / steps),
            "radius": _finite_mean(self.radii),
            "curvature": _finite_mean(self.curvatures),
            "active": float((q > bound).double().sum() / (len(q) + self.skipped)),
            "blocks": {name: count / (len(q) + self.skipped) for name, count in self.blocks.most_common()},
        }


def _mean(values: list[Tensor]) -> float:
    return float(torch.stack([value.double() for value in values]).mean())


def _finite_mean(values: list[Tensor]) -> float | None:
    """Without steps that overflowed (fp16), whose numbers are not finite; None if none is left."""
    numbers = torch.stack([value.double() for value in values]).cpu()
    finite = numbers[numbers.isfinite()]
    return float(finite.mean()) if len(finite) else None


def precision_on(recipe: Recipe, device: torch.device) -> Literal["float32", "bf16", "fp16"]:
    """The recipe's precision, where "auto" depends on the device."""
    if recipe.precision != "auto":
        return recipe.precision
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"


class GradientMean:
    """The mean gradient of the micro-batches of one step, weighted by the normalisers of their losses.

    C of a batch is a sum over samples divided by a normaliser N: the number of samples, of labels that are not ignored, or the
    sum of their class weights. With L_i the penalised loss of micro-batch i, `.grad` ends as ∇ Σ N_i·L_i / Σ N_i. Without the
    penalty that is the gradient of one batch of all their samples, however many there are. Each micro-batch has its own
    penalty.
    """

    def __init__(self, step: Step) -> None:
        self._step, self._net = step, step.net
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._weights: list[Tensor] = []

    def add(self, inputs: Any, target: Any) -> None:
        """Add what this micro-batch left in `.grad`."""
        (weight,) = self._step.reducer.sum([self._step.own_normaliser(inputs, target)])
        self._weights.append(weight)
        for p in self._net.parameters():
            if p.grad is not None:
                part = p.grad * weight  # a copy: graphs leave every gradient in the same memory
                self._sums[p] = self._sums[p].add_(part) if p in self._sums else part

    def take(self) -> None:
        """Leave the mean in `.grad`, and start over."""
        total = torch.stack(self._weights).sum()
        for p in self._net.parameters():
            p.grad = self._sums[p].div_(total) if p in self._sums else None
        self._sums, self._weights = {}, []


class Trainer:
    """Trains a network for an epoch at a time. A step of the optimizer takes `accumulate` batches."""

    def __init__(
        self,
        step: Step,
        state: State,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        device: torch.device,
        accumulate: int = 1,
    ) -> None:
        self.step, self.net, self.state = step, step.net, state
        self.optimizer, self.recipe, self.device = optimizer, recipe, device
        self.precision = precision_on(recipe, device)
        graphs = device.type == "cuda" and recipe.execution != "eager" and self.precision != "fp16"
        self.executor = make_executor(step, state, self._precision, graphs=graphs)
        self.peaks = [float(group["lr"]) for group in optimizer.param_groups]
        """The learning rates that a schedule scales."""
        self.scheduled = list(self.peaks)
        """Those that it set last."""
        self.accumulate = accumulate
        self._mean = GradientMean(step)
        self.scaler = torch.amp.GradScaler(device.type) if self.precision == "fp16" else None

    def check_derivatives(self, batch: tuple[Any, Any]) -> None:
        """Raises, before any training, what a step along some layer would: for derivatives that PyTorch does not have."""
        with preserve_modes(self.net), self._precision():
            self.net.train()
            self.step.check_derivatives(self.state, *batch)

    def running(self) -> AbstractContextManager[None]:
        """Around steps, and best around all that is done with the network between them: with graphs, one stream for it all."""
        return self.executor.running()

    def train(
        self,
        batches: Iterable[tuple[Any, Any]],
        *,
        total: int | None,
        epoch: int,
        rate: Callable[[float], float] | None,
        mu: Callable[[float], float],
        before_step: Callable[[tuple[Any, Any]], None],
        show: Callable[[int, float | None], None],
        before_batch: Callable[[tuple[Any, Any]], None] = lambda _: None,
        after_step: Callable[[int], bool] = lambda _: False,
    ) -> EpochStatistics:
        """One pass over `batches`, `total` of them if that is known, which ends early once `after_step` returns True.

        `rate` and `mu` are functions of the progress in the epoch, from 0 to 1. The last step takes the batches that are left,
        if fewer than `accumulate`. `before_batch` gets every batch, `before_step` the first of each step."""
        self.net.train()
        ahead = Prefetcher(batches)
        self.executor.begin_epoch()
        statistics = EpochStatistics()
        start = shown = time.perf_counter()
        pending = done = 0

        def finish_step() -> bool:
            """The optimizer's step; returns whether to stop."""
            nonlocal start, pending, done
            self.optimizer_step()
            paused = time.perf_counter()
            stop = after_step(done)
            start += time.perf_counter() - paused
            pending, done = 0, done + 1
            return stop

        with self.running(), self._fetching(ahead):
            for number, batch in enumerate(ahead):
                paused = time.perf_counter()
                before_batch(batch)
                if not pending:
                    before_step(batch)
                start += time.perf_counter() - paused
                if not pending:
                    progress = number / total if total else 0.0
                    if rate is not None:
                        self._set_learning_rates(rate(progress))
                    self.state.mu = mu(progress)
                self.backward(batch, statistics)
                pending += 1
                stop = pending == self.accumulate and finish_step()
                if (number + 1) % CHECK_EVERY == 0:
                    self._check(statistics, epoch)
                if time.perf_counter() - shown > SHOW_EVERY:
                    shown = time.perf_counter()
                    checked = statistics.checked
                    show(number + 1, float(statistics.losses[checked - 1]) if checked else None)
                if stop:
                    break
            if pending:
                finish_step()
            self._check(statistics, epoch)
        statistics.seconds = time.perf_counter() - start
        return statistics

    def _set_learning_rates(self, factor: float) -> None:
        """Scales the peaks. A learning rate that a callback has set since the last step scales its peak, and that of a group
        that it has added is a peak."""
        for number, group in enumerate(self.optimizer.param_groups):
            lr = float(group["lr"])
            if number == len(self.peaks):
                self.peaks.append(lr)
                self.scheduled.append(lr)
            elif lr != self.scheduled[number]:
                last = self.scheduled[number]
                self.peaks[number] = self.peaks[number] * lr / last if last else lr
            group["lr"] = self.scheduled[number] = self.peaks[number] * factor

    @contextmanager
    def _fetching(self, ahead: Prefetcher) -> Iterator[None]:
        """Batches are fetched before a step waits for the device."""
        self.executor.fetch = ahead.fetch
        try:
            yield
        finally:
            self.executor.fetch = None

    def backward(self, batch: tuple[Any, Any], statistics: EpochStatistics) -> None:
        """The gradient of one batch, and its part in the step's mean where that takes several."""
        executor, state, step, number = self.executor, self.state, self.step, len(statistics.losses)
        executor.zero_grad()
        due = state.mu > 0 and not state.since_penalty
        scale: float | Tensor = 1.0
        if self.scaler is not None:
            scale = self.scaler.scale(torch.ones((), device=self.device))
        try:
            loss = executor.backward(batch[0], batch[1], scale=scale)
        except (HgnpError, torch.OutOfMemoryError):  # another pass would run out of memory, too
            raise
        except Exception as error:
            if is_too_few_values(error):
                raise InputError(
                    "train must have batches of at least two samples for a batch norm, got a single one in batch "
                    f"{number}; use drop_last=True or another batch size"
                ) from error
            explain_failure(
                step.net, step.loss, step.output, batch, "train", where=f"batch {number} of train",
                loss_needs_training_mode=True,
            )  # fmt: skip
            raise
        statistics.losses.append(loss)
        if due and not state.plan.penalty:
            statistics.skipped += 1
        elif due and state.statistics is not None:
            statistics.radii.append(state.statistics.penalized.radius)
            statistics.curvatures.append(state.statistics.curvature)
            statistics.mus.append(self.step.penalty_weight(state))
            statistics.blocks[state.statistics.penalized.block.name] += 1
        if self.accumulate > 1:
            self._mean.add(*batch)

    def optimizer_step(self) -> None:
        """The optimizer's step on the gradients of the batches since the last, clipped."""
        if self.accumulate > 1:
            self._mean.take()
        if self.recipe.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            # the gradients of other parameters are still scaled
            stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(stepped, self.recipe.clip_norm)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.accumulate > 1:
            self.optimizer.step()  # the mean is in memory that graphs do not know
        else:
            self.executor.optimizer_step(self.optimizer)

    def _precision(self) -> AbstractContextManager[Any]:
        if self.precision == "float32":
            return nullcontext()
        half = torch.bfloat16 if self.precision == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype=half)

    def _check(self, statistics: EpochStatistics, epoch: int) -> None:
        if statistics.checked == len(statistics.losses):
            return
        values = torch.stack([loss.double() for loss in statistics.losses[statistics.checked :]]).tolist()
        for offset, value in enumerate(values):
            if not math.isfinite(value):
                raise DivergedError(f"the loss is {value} in epoch {epoch}, batch {statistics.checked + offset}")
        statistics.checked = len(statistics.losses)


def make_steps(net: nn.Module, task: Task, recipe: Recipe, reducer: Reducer = LOCAL) -> tuple[Step, Step, State]:
    """The step that trains, the one that scores, and their state: the same step, unless the method has its own training
    step."""
    bundle, choices = recipe.flatness_choices
    recipe = recipe.resolved()
    assert recipe.refresh_every is not None
    assert recipe.skip_inactive is not None
    step, state = make_step(
        net,
        loss=task.loss,
        mu=recipe.training_mu,
        bound=recipe.bound,
        output=task.output,
        flatness=bundle,
        penalty_every=recipe.penalty_every,
        refresh_every=recipe.refresh_every,
        skip_inactive=recipe.skip_inactive,
        reducer=reducer,
        **choices,
    )
    if recipe.method == "sam":
        return SAMStep(net, loss=task.loss, rho=recipe.rho, output=task.output, reducer=reducer), step, state
    return step, step, state
