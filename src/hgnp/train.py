"""Algorithm 2: train, prune while training, fine-tune; `prune` is the one call.

for epoch = 0, 1, …
    if epoch ≥ E1 and epoch mod E2 = 0 and the target is not met:
        score neurons on a mini-batch, remove the N least important          rounds.Pruner
    train an epoch by Algorithm 1                                            epoch.Epochs
    validate, write a checkpoint
until E3 epochs after the one in which the target was met
"""

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgnp import batches as loading
from hgnp import checkpoint, schedule, streams
from hgnp.baselines import SAM
from hgnp.batches import Batches, check_first, check_labels, is_classification, pick, samples_in
from hgnp.curvature.losses import Loss
from hgnp.epoch import DivergedError, Epochs
from hgnp.evaluate import Metric, evaluate
from hgnp.flatness import Flatness
from hgnp.folder import Folder, read_json, versions, write_json
from hgnp.measure import copied, features, latencies, top_curvature
from hgnp.neurons import Neurons, Preview
from hgnp.neurons.surgery import commit
from hgnp.recipe import Recipe
from hgnp.result import Facts, Result, Row, Target
from hgnp.rounds import Pruner
from hgnp.storage import changes_to_fit, describe, load, save

OptimizerOrMaker = torch.optim.Optimizer | Callable[[Iterable[Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True)
class State:
    """What `on_epoch` sees."""

    epoch: int
    row: Row
    history: list[Row]
    net: nn.Module


@dataclass
class Place:
    """Where a run stands."""

    epoch: int = 0
    reached: int | None = None
    """The epoch in which the target was met."""
    steps: int = 0
    """Steps since pruning began."""
    position: float = 0.0
    """Of the learning-rate schedule, 0 to 1."""
    parts: int = 1
    seconds: float = 0.0
    stopped: str | None = None
    before: dict[str, Any] | None = None
    history: list[Row] = field(default_factory=list)


def prune(
    net: nn.Module,
    train: Iterable[Any],
    val: Iterable[Any] | None = None,
    *,
    recipe: Recipe,
    loss: Loss = F.cross_entropy,
    metric: Metric | None = None,
    optimizer: OptimizerOrMaker | None = None,
    scheduler: Any = None,
    unpack: loading.Unpack | None = None,
    output: loading.Output | None = None,
    protect: Iterable[str] = (),
    device: str | torch.device | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    on_epoch: Callable[[State], object] | None = None,
    _progress: Any = None,
    _about: dict[str, Any] | None = None,
) -> Result:
    """Train `net` and prune it in place by `recipe`.

    train, val  loaders, gone through anew every epoch; without `val` there is no metric
    metric      metric(outputs, targets) over the whole validation set, higher is better; accuracy for class labels
    optimizer   an optimizer over the network's parameters, or what makes one of them; SGD by the recipe otherwise
    scheduler   a learning-rate scheduler of that optimizer, or what makes one of it, stepped every epoch
    unpack      unpack(batch) → (inputs, target), where batches are neither (x, y) nor mappings with `labels`
    output      picks the logits from what the network returns
    protect     names of layers, or of modules whose layers all stay
    device      where to train; the network's own device otherwise
    out         the run's folder: checkpoint every epoch, metrics, the pruned model (docs/runs.md)
    resume      go on with the run in `out`, to the result it would have had; a finished one is returned
    on_epoch    called after every epoch; True ends the run there
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"net: a {type(net).__name__} was given; an nn.Module would do")
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe: a {type(recipe).__name__} was given; hgnp.Recipe(keep=0.1) would do")
    folder = None if out is None else Folder(out)
    if folder is None and resume:
        raise ValueError("resume: True was given without out, the folder of the run to go on with")
    if folder is not None:
        folder.claim(resume=resume)
        if folder.info.exists():
            folder.check_recipe(recipe)
        if folder.finished:
            return finished(folder, net, recipe)
    run = _Run(
        net, train, val, recipe, loss, metric, optimizer, scheduler, unpack, output, protect, device, folder, _progress, _about
    )  # fmt: skip
    try:
        return run.go(on_epoch)
    finally:
        run.progress("stop")


def finished(folder: Folder, net: nn.Module, recipe: Recipe) -> Result:
    """The result of a run that has ended, with its network in `net`."""
    stored, history = read_json(folder.result), checkpoint.read(folder.checkpoint)["place"]["history"]
    return Result(
        model=load(folder.model, net), history=history, recipe=recipe, before=Facts(**stored["before"]),
        after=Facts(**stored["after"]), target=Target(**stored["target"]), metric=stored["metric"], latency=stored["latency"],
        seconds=stored["seconds"], parts=stored["parts"], stopped=stored["stopped"], out=folder.path,
    )  # fmt: skip


class _Run:
    def __init__(
        self,
        net: nn.Module,
        train: Iterable[Any],
        val: Iterable[Any] | None,
        recipe: Recipe,
        loss: Loss,
        metric: Metric | None,
        optimizer: OptimizerOrMaker | None,
        scheduler: Any,
        unpack: loading.Unpack | None,
        output: loading.Output | None,
        protect: Iterable[str],
        device: str | torch.device | None,
        folder: Folder | None,
        progress: Any,
        about: dict[str, Any] | None,
    ) -> None:
        if recipe.seed is not None:
            streams.seed(recipe.seed)
        self.net = net if device is None else net.to(device)
        first = next(net.parameters(), None)
        if first is None:
            raise ValueError("net: it has no parameters")
        self.device = first.device
        self.recipe, self.loss, self.metric, self.output, self.folder = recipe, loss, metric, output, folder
        self._progress = progress
        self.train = Batches(train, "train", unpack or loading.unpack, self.device)
        self.val = None if val is None else Batches(val, "val", unpack or loading.unpack, self.device)
        self.place = Place()

        inputs, target = next(iter(self.train))
        out = check_first(net, loss, output, inputs, target)
        self.classes: int | None = out.shape[1] if is_classification(loss, target) else None
        self.inputs = inputs
        self.full = copied(net)
        known = folder is not None and folder.checkpoint.exists()
        stored = checkpoint.read(folder.checkpoint) if folder is not None and known else None
        if stored is not None and recipe.coupling == "paper":
            self._fill(stored)
        pair = pick(inputs, torch.arange(min(2, samples_in(inputs))))
        self.samples = samples_in(pair)
        self.neurons = Neurons(net, pair, protect=protect, approximate=recipe.approximate)
        at_start = self.neurons.preview({}) if stored is None else Preview(**stored["at_start"])
        self.optimizer = self._optimizer(optimizer)
        self.scheduler = self._scheduler(scheduler)
        bundle, choices = recipe.flatness_choices
        self.flatness = Flatness(
            net, loss=loss, mu=recipe.training_mu, bound=recipe.bound, output=output, flatness=bundle, **choices
        )
        sam = recipe.method == "sam"
        trainer = SAM(net, loss=loss, rho=recipe.rho, output=output) if sam else self.flatness
        self.epochs = Epochs(net, trainer, self.optimizer, recipe, self.device)
        self.pruner = Pruner(self.neurons, self.flatness, recipe, self.optimizer, at_start)
        self.features = features(net, inputs, out, classes=self.classes is not None, train=train, val=val)
        self.about = about or {}
        if stored is not None:
            self._restore(stored)
        else:
            self.pruner.check_reachable()
            self._write_info()
            self._save()

    # Algorithm 2

    def go(self, on_epoch: Callable[[State], object] | None) -> Result:
        self.progress(
            "start", self._info() | {"epochs_done": self.place.epoch, "out": self.folder and str(self.folder.path)}
        )
        while not self._done():
            start = time.perf_counter()
            row = self._epoch()
            row["seconds"] = time.perf_counter() - start
            self.place.history.append(row)
            self.place.seconds += row["seconds"]
            self.place.epoch += 1
            if on_epoch is not None and on_epoch(State(row["epoch"], row, self.place.history, self.net)) is True:
                self.place.stopped = f"on_epoch ended it after epoch {row['epoch']}"
            self._save()
            self.progress("epoch", row, self._seconds_left())
        return self._finish()

    def _done(self) -> bool:
        place, recipe = self.place, self.recipe
        if place.reached is None and place.epoch >= recipe.warmup_epochs and self.pruner.left <= recipe.keep:
            place.reached = place.epoch - 1
        return place.stopped is not None or (
            place.reached is not None and place.epoch > place.reached + recipe.finetune_epochs
        )

    def _epoch(self) -> Row:
        place, recipe = self.place, self.recipe
        pruning = place.reached is None and place.epoch >= recipe.warmup_epochs
        streams.start_workers_anew(self.train.loader)
        if hasattr(getattr(self.train.loader, "sampler", None), "set_epoch"):
            self.train.loader.sampler.set_epoch(place.epoch)  # type: ignore[attr-defined]
        batches: Iterator[tuple[Any, Any]] = iter(self.train)
        removed = 0
        if pruning and recipe.prune_unit == "epochs" and place.epoch % recipe.prune_every == 0:
            first = list(itertools.islice(batches, recipe.score_batches))
            removed = self._round(first)
            batches = itertools.chain(first, batches)
        recent: list[tuple[Any, Any]] = []

        def before_step(batch: tuple[Any, Any]) -> None:
            nonlocal removed
            if place.epoch == 0 and self.classes is not None:
                check_labels(self.loss, batch[1], self.classes)
            if pruning and recipe.prune_unit == "steps":
                recent[:] = [*recent, batch][-recipe.score_batches :]
                if place.reached is None and place.steps % recipe.prune_every == 0:
                    removed += self._round(recent)
                place.steps += 1

        ahead = self._ahead()
        start, self.place.position = place.position, place.position + (1 - place.position) * ahead

        def rate(share: float) -> float:
            return schedule.factor(recipe, start + (place.position - start) * share)

        seen = self._guarded(
            lambda: self.epochs.train(
                batches, steps=self.train.count, epoch=place.epoch, rate=None if recipe.schedule == "constant" else rate,
                mu=lambda share: recipe.training_mu * self._mu_share(place.epoch + share),
                before_step=before_step,
                show=lambda step, value: self.progress("step", place.epoch, step, self.train.count, value),
            )
        )  # fmt: skip
        val_loss, metric = self._validate()
        self._step_scheduler(val_loss)
        return self._row(seen.summary(recipe.bound), removed, val_loss, metric)

    def _round(self, batches: list[tuple[Any, Any]]) -> int:
        if self.place.before is None:
            self.place.before = dataclasses.asdict(self._facts())
        removed = self.pruner.round(batches)
        if self.pruner.left <= self.recipe.keep:
            self.place.reached = self.place.epoch
        elif self.pruner.exhausted:
            self.place.reached = self.place.epoch
            self.progress("note", "no more neurons can be removed: the rest is frozen or the last of its layer")
        return removed

    def _guarded(self, train: Callable[[], Any]) -> Any:
        try:
            return train()
        except DivergedError as error:
            last = "no checkpoint was kept, as out was not given"
            if self.folder is not None:
                last = f"the last good checkpoint is {self.folder.checkpoint}, after {self.place.epoch} epochs"
            raise DivergedError(f"{error}; {last}; a smaller lr or mu may help") from None

    # What goes along

    def _ahead(self) -> float:
        """The share of what is left of the schedule that this epoch takes."""
        place, recipe = self.place, self.recipe
        if recipe.anneal == "finetune":
            if place.reached is None or place.epoch <= place.reached:
                return 0.0
            return 1 / (place.reached + recipe.finetune_epochs + 1 - place.epoch)
        return 1 / self._epochs_left()

    def _epochs_left(self) -> int:
        """Epochs from this one on, by the present estimate."""
        place, recipe = self.place, self.recipe
        if place.reached is not None:
            return max(place.reached + recipe.finetune_epochs + 1 - place.epoch, 1)
        left, start = self.pruner.left, self.pruner.at_start.neurons
        waiting = max(recipe.warmup_epochs - place.epoch, 0)
        if left <= recipe.keep:
            return max(waiting + recipe.finetune_epochs, 1)
        rounds = schedule.rounds_left(recipe, left=left, neurons=self.neurons.count, at_start=start)
        if recipe.prune_unit == "steps":
            return waiting + -(-rounds * recipe.prune_every // (self.train.count or 1)) + recipe.finetune_epochs
        return waiting + rounds * recipe.prune_every + recipe.finetune_epochs

    def _seconds_left(self) -> float | None:
        if self._done():
            return None
        recent = [row["seconds"] for row in self.place.history[-3:]]
        return self._epochs_left() * sum(recent) / len(recent)

    def _mu_share(self, epochs: float) -> float:
        return min(1.0, epochs / self.recipe.mu_warmup_epochs) if self.recipe.mu_warmup_epochs else 1.0

    def _optimizer(self, given: OptimizerOrMaker | None) -> torch.optim.Optimizer:
        r = self.recipe
        if given is None:
            return torch.optim.SGD(
                self.net.parameters(), lr=r.lr, momentum=r.momentum, weight_decay=r.weight_decay,
                nesterov=r.nesterov and r.momentum > 0,
            )  # fmt: skip
        made = given if isinstance(given, torch.optim.Optimizer) else given(self.net.parameters())
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(f"optimizer: it made a {type(made).__name__}; an optimizer or its maker would do")
        if isinstance(made, torch.optim.LBFGS):
            raise ValueError(
                "optimizer: LBFGS evaluates the loss several times a step; SGD, AdamW and the like would do"
            )
        mine = {id(p) for p in self.net.parameters()}
        if not all(id(p) in mine for group in made.param_groups for p in group["params"]):
            raise ValueError("optimizer: it holds parameters that are not the network's")
        return made

    def _scheduler(self, given: Any) -> Any:
        if given is None:
            return None
        if self.recipe.schedule != "constant":
            raise ValueError(
                f"scheduler: it was given beside schedule={self.recipe.schedule!r}; one of the two would do"
            )
        return given if hasattr(given, "step") else given(self.optimizer)

    def _step_scheduler(self, val_loss: float | None) -> None:
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(val_loss if val_loss is not None else 0.0)
        elif self.scheduler is not None:
            self.scheduler.step()

    def _validate(self) -> tuple[float | None, float | None]:
        if self.val is None:
            return None, None
        return evaluate(self.net, self.val, self.loss, self.metric, self.output)

    def _row(self, summary: Row, removed: int, val_loss: float | None, metric: float | None) -> Row:
        place, recipe, now = self.place, self.recipe, self.neurons.preview({})
        phase = "prune"
        if place.epoch < recipe.warmup_epochs:
            phase = "warmup"
        elif place.reached is not None and place.epoch > place.reached:
            phase = "finetune"
        return {"epoch": place.epoch, "phase": phase} | summary | {
            "val_loss": val_loss,
            "metric": metric,
            "kept": now.kept,
            "parameters": now.parameters,
            "neurons": now.neurons,
            "macs": now.macs // self.samples,
            "removed": removed,
            "widths": {layer.name: layer.alive for layer in self.neurons.layers},
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "mu": self.flatness.mu,
        }  # fmt: skip

    def _facts(self) -> Facts:
        """Of the network as it is now; validated anew only if it has not been since its last step."""
        if self.place.history:
            val_loss, metric = self.place.history[-1]["val_loss"], self.place.history[-1]["metric"]
        else:
            val_loss, metric = self._validate()
        now = self.neurons.preview({})
        sharp = top_curvature(self.net, self.val or self.train, self.loss, self.output)
        return Facts(metric, val_loss, now.parameters, now.neurons, now.macs // self.samples, sharp)

    def _finish(self) -> Result:
        place, recipe = self.place, self.recipe
        after = self._facts()
        before = Facts(**place.before) if place.before is not None else after
        latency = None
        if self.full is not None:
            full = self.full.to(self.device)
            (slow, fast), latency = latencies([full, self.net], self.inputs, self.device)
            before = dataclasses.replace(before, latency_ms=slow)
            after = dataclasses.replace(after, latency_ms=fast)
        if self.pruner.exhausted and self.pruner.left > recipe.keep:
            place.stopped = place.stopped or "no more neurons could be removed"
        result = Result(
            model=self.net, history=place.history, recipe=recipe, before=before, after=after,
            target=Target(recipe.target, recipe.keep, self.pruner.left), metric=self._metric_name(), latency=latency,
            seconds=place.seconds, parts=place.parts, stopped=place.stopped,
            out=None if self.folder is None else self.folder.path,
        )  # fmt: skip
        if self.folder is not None:
            save(self.net, self.folder.model)
            write_json(self.folder.result, result.as_dict())
        return result

    def _metric_name(self) -> str:
        if self.metric is not None:
            return getattr(self.metric, "__name__", type(self.metric).__name__)
        return "accuracy" if self.classes is not None else "-loss"

    # The run's folder

    def _info(self) -> dict[str, Any]:
        start = self.pruner.at_start
        return {
            "name": None, "method": self.recipe.method, "seed": self.recipe.seed, "metric": self._metric_name(),
            "model": type(self.net).__qualname__, "recipe": self.recipe.as_dict(), "versions": versions(),
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device),
            "threads": torch.get_num_threads(), "start": None,
            "at_start": {"parameters": start.parameters, "neurons": start.neurons, "macs": start.macs // self.samples},
        } | self.about | {"features": self.features | self.about.get("features", {})}  # fmt: skip

    def _write_info(self) -> None:
        if self.folder is not None:
            self.folder.write_info(self._info())

    def _save(self) -> None:
        if self.folder is None:
            return
        tensors, widths = describe(self.net)
        trainer_state = {
            "optimizer": self.optimizer.state_dict(),
            "peaks": self.epochs.peaks,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": None if self.epochs.scaler is None else self.epochs.scaler.state_dict(),
            "flatness": self.flatness.state_dict(),
        }
        self.folder.write_checkpoint(
            {
                "net": {"tensors": tensors, "widths": widths},
                "neurons": self.neurons.state_dict(),
                "at_start": dataclasses.asdict(self.pruner.at_start),
                "place": dataclasses.asdict(self.place),
                "streams": streams.take(self.train.loader, self.val and self.val.loader),
            }
            | trainer_state
        )
        self.folder.write_metrics(self.place.history)

    def _fill(self, stored: dict[str, Any]) -> None:
        commit(changes_to_fit(stored["net"]["widths"], stored["net"]["tensors"], self.net))

    def _restore(self, stored: dict[str, Any]) -> None:
        if self.recipe.coupling == "coupled":
            self._fill(stored)
        self.neurons.load_state_dict(stored["neurons"])
        self.optimizer.load_state_dict(stored["optimizer"])
        self.epochs.peaks = stored["peaks"]
        if self.scheduler is not None:
            self.scheduler.load_state_dict(stored["scheduler"])
        if self.epochs.scaler is not None:
            self.epochs.scaler.load_state_dict(stored["scaler"])
        self.flatness.load_state_dict(stored["flatness"])
        self.place = Place(**stored["place"])
        self.place.parts += 1
        if self.folder is not None:
            self.folder.write_metrics(self.place.history)
        streams.put_back(stored["streams"], self.train.loader, self.val and self.val.loader)

    def progress(self, what: str, *args: Any) -> None:
        if self._progress is not None:
            getattr(self._progress, what)(*args)


__all__ = ["DivergedError", "State", "prune"]
