"""Algorithm 2, with what goes along: validation, checkpoints, facts before and after.

for epoch = 0, 1, …                                                          plan.Plan
    if epoch ≥ E1 and epoch mod E2 = 0 and the target is not met:
        score neurons on a mini-batch, remove the N least important          rounds.Pruner
    train an epoch by Algorithm 1                                            trainer.Trainer
    validate, write a checkpoint                                             evaluate, folder.Folder
until E3 epochs after the one in which the target was met
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hgnp.curvature.autodiff.forward import samples_in
from hgnp.errors import DivergedError, InputError
from hgnp.execution.graphed import Graphed
from hgnp.io.weights import changes_to_fit, described
from hgnp.progress import Progress
from hgnp.pruning import Neurons, Preview
from hgnp.pruning.surgery import Change, commit
from hgnp.recipe import Recipe
from hgnp.result import Facts, Result, Row, Snapshot, Target
from hgnp.training import checkpoint, rng_state, schedule
from hgnp.training.data import check_labels, checked, pick
from hgnp.training.evaluate import Evaluation
from hgnp.training.first_batch import look
from hgnp.training.measure import Measurements, sample_of
from hgnp.training.memory_format import choose, contiguous_layers, in_memory_format
from hgnp.training.optimizers import OptimizerOrMaker, make_optimizer, make_scheduler, step_scheduler
from hgnp.training.plan import Plan
from hgnp.training.pruner import Pruner
from hgnp.training.run_folder import Folder, versions
from hgnp.training.task import State, Task
from hgnp.training.trainer import Trainer, make_steps

Batch = tuple[Any, Any]


class Run:
    """One run, from its first batch to its result."""

    def __init__(
        self,
        net: nn.Module,
        task: Task,
        recipe: Recipe,
        folder: Folder | None,
        progress: Progress,
        about: dict[str, Any],
    ) -> None:
        self.net, self.task, self.recipe, self.folder, self.about = net, task, recipe, folder, about
        self.plan = Plan(recipe)
        self.progress = progress
        self._filled: list[Change] = []
        self._noted: set[str] = set()
        self.states: dict[int, checkpoint.Packed] = {}
        """Without a folder: epoch → what a snapshot is fine-tuned from."""

    def prepare(
        self, stored: dict[str, Any] | None, optimizer: OptimizerOrMaker | None, scheduler: Any, protect: Iterable[str]
    ) -> None:
        net, task, recipe = self.net, self.task, self.recipe
        first = look(net, task)
        inputs, target = first.inputs, first.target
        self.classes, self.val_classes = first.classes, first.val_classes
        self.metric, self.features = first.metric, first.features
        self.inputs, self._contiguous = inputs, contiguous_layers(net)
        self.measurements = Measurements(net, task, self.plan, (inputs, target), first.val)
        if stored is not None and recipe.coupling == "paper":  # its structure is that of the network as it is now
            self._fill(stored)
        two = pick(inputs, torch.arange(min(2, samples_in(inputs))))
        self.samples = samples_in(two)
        if isinstance(protect, Iterable) and not isinstance(protect, str):  # anything else is refused by Neurons
            protect = list(protect)
        self.neurons = Neurons(net, two, protect=protect, approximate=recipe.approximate)
        at_start = self.neurons.preview({}) if stored is None else Preview(**stored["at_start"])
        self.optimizer = make_optimizer(net, recipe, optimizer)
        self.scheduler = make_scheduler(self.optimizer, recipe, scheduler, validated=task.val is not None)
        self.made_with: dict[str, Any] = {
            "optimizer": type(self.optimizer).__name__,
            "scheduler": None if self.scheduler is None else type(self.scheduler).__name__,
            "parameter groups": len(self.optimizer.param_groups),
            "protect": sorted(protect),
            "batches an epoch": task.train.count,
        }
        step, self.scoring, self.step_state = make_steps(net, task, recipe)
        self.epochs = Trainer(step, self.step_state, self.optimizer, recipe, task.train.device)
        graphs = isinstance(self.epochs.executor, Graphed)
        self.evaluation = Evaluation(net, task.loss, task.metric, task.output, graphs=graphs)
        self.pruner = Pruner(self.neurons, self.scoring, self.step_state, recipe, self.optimizer, at_start)
        self._layout_note: str | None = None
        if stored is not None:
            self._restore(stored)
        else:
            self.pruner.check_reachable()
            with rng_state.untouched():
                self.memory_format, self._layout_note = choose(net, task, recipe, (inputs, target))
            self._save()
        self._filled = []

    def take_back(self) -> None:
        """Leave the network as it was found, if it was filled from a run that then did not fit."""
        for change in reversed(self._filled):
            change.undo()

    # Algorithm 2

    def train(self, on_epoch: Callable[[State], object] | None) -> None:
        plan = self.plan
        self.tell("start", self._info() | {"epochs_done": plan.epoch, "out": self.folder and str(self.folder.path)})
        for note in (self._layout_note, self.measurements.note):
            self._note_once(note)
        with self.epochs.running(), in_memory_format(self.net, self.optimizer, self.memory_format, self._contiguous):
            while self._goes_on():
                self._next(on_epoch)

    def _next(self, on_epoch: Callable[[State], object] | None) -> None:
        """An epoch, the user's word on it, and its checkpoint."""
        plan, start = self.plan, time.perf_counter()
        row = self._epoch()
        row["seconds"] = time.perf_counter() - start
        plan.history.append(row)
        plan.seconds += row["seconds"]
        reached = plan.reach(self.pruner.left)
        plan.epoch += 1
        if on_epoch is not None and on_epoch(State(row["epoch"], row, plan.history, self.net)) is True:
            plan.stopped = f"on_epoch ended it after epoch {row['epoch']}"
        if reached:
            self._take_snapshot(reached[0])
        self._save()
        recent = [row["seconds"] for row in plan.history[-3:]]
        epochs = self._epochs_left() + len(self.recipe.snapshots) * self.recipe.finetune_epochs
        self.tell("epoch", row, epochs * sum(recent) / len(recent) if self._goes_on() else None)

    def _goes_on(self) -> bool:
        self.plan.settle(self.pruner.left)
        return not self.plan.done

    def _epoch(self) -> Row:
        plan, recipe, train = self.plan, self.recipe, self.task.train
        rng_state.begin_epoch(train.loader, plan.epoch)
        batches: Iterator[Batch] = iter(train)
        removed = 0
        if plan.round_due:
            first = list(itertools.islice(batches, recipe.score_batches))
            removed = self._round(first)
            batches = itertools.chain(first, batches)
        by_steps = plan.pruning and recipe.prune_unit == "steps"
        recent: list[Batch] = []

        def before_step(batch: Batch) -> None:
            nonlocal removed
            if plan.epoch == 0 and self.classes is not None:
                check_labels(self.task.loss, batch[1], self.classes, "train")
            if by_steps and plan.reached is None:
                recent[:] = [*recent, batch][-recipe.score_batches :]
                if plan.steps % recipe.prune_every == 0:
                    removed += self._round(recent)
                plan.steps += 1

        since, (start, end) = 0.0, plan.advance(self._epochs_left())

        def rate(share: float) -> float:
            nonlocal since, start, end
            position = start + (end - start) * (share - since) / (1 - since)
            if plan.ends_here and plan.position < 1:  # known only since the last round, in the middle of the epoch
                since, start, end = share, position, 1.0
                plan.position = 1.0
            return schedule.factor(recipe, position)

        try:
            seen = self.epochs.train(
                batches, steps=train.count, epoch=plan.epoch, rate=None if recipe.schedule == "constant" else rate, mu=plan.mu,
                before_step=before_step, show=lambda step, loss: self.tell("step", plan.epoch, step, train.count, loss),
            )  # fmt: skip
        except DivergedError as error:
            raise DivergedError(f"{error}; {self._last_good()}; a smaller lr or mu may help") from None
        val_loss, metric = self._validate()
        self._note_once(step_scheduler(self.scheduler, val_loss))
        return self._row(seen.summary(recipe.bound), removed, val_loss, metric)

    def _round(self, batches: list[Batch]) -> int:
        if self.plan.before is None:
            self.plan.before = dataclasses.asdict(self._facts())
        frozen = {entry.name for entry in self.neurons.frozen}
        removed = self.pruner.round(batches)
        for entry in self.neurons.frozen:
            if entry.name not in frozen:  # with coupling "paper" the network is recorded anew
                self.tell("note", f"{entry.name}: its {entry.count} neurons can no longer be removed: {entry.reason}")
        self.plan.last_round = self.plan.epoch
        self.plan.note_kept(self.neurons.kept)
        if not removed or self.pruner.left <= self.recipe.keep:
            self.plan.reached = self.plan.epoch
        if not removed:
            self.tell("note", "no more neurons can be removed: the rest is frozen or the last of its layer")
        return removed

    def _epochs_left(self) -> int:
        return self.plan.epochs_left(
            left=self.pruner.left, neurons=self.neurons.count, at_start=self.pruner.at_start.neurons,
            steps=self.task.train.count,
        )  # fmt: skip

    # What is known

    def _validate(self) -> tuple[float | None, float | None]:
        task = self.task
        if task.val is None:
            return None, None
        rng_state.begin_epoch(task.val.loader, self.plan.epoch)
        found = self.evaluation(task.val if self.plan.epoch else checked(task.val, task.loss, self.val_classes, "val"))
        self._note_once(self.evaluation.note)
        return found

    def _row(self, summary: Row, removed: int, val_loss: float | None, metric: float | None) -> Row:
        now = self.neurons.preview({})
        return {"epoch": self.plan.epoch, "phase": self.plan.phase} | summary | {
            "val_loss": val_loss,
            "metric": metric,
            "kept": now.kept,
            "parameters": now.parameters,
            "neurons": now.neurons,
            "macs": now.macs // self.samples,
            "removed": removed,
            "widths": {layer.name: layer.alive for layer in self.neurons.layers},
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "mu": self.step_state.mu,
        }  # fmt: skip

    def _facts(self) -> Facts:
        """At the end of an epoch or the start of the run."""
        last = self.plan.history[-1] if self.plan.history else None
        val_loss, metric = self._validate() if last is None else (last["val_loss"], last["metric"])
        now = self.neurons.preview({})
        facts = Facts(metric, val_loss, now.parameters, now.neurons, now.macs // self.samples)
        with rng_state.untouched():
            return self.measurements.with_sharpness(facts, self.net)

    def finish(self, snapshots: tuple[Snapshot, ...] = ()) -> Result:
        with self.epochs.running():
            return self._finish(snapshots)

    def _finish(self, snapshots: tuple[Snapshot, ...]) -> Result:
        plan, recipe = self.plan, self.recipe
        if self.folder is not None:
            self.folder.settle()  # latencies are measured with nothing beside them
        after = self._facts()
        before = Facts(**plan.before) if plan.before is not None else after
        before, after, latency = self.measurements.with_latency(before, after, self.net)
        if plan.reached is not None and self.pruner.left > recipe.keep:
            plan.stopped = plan.stopped or "no more neurons could be removed"
        result = Result(
            model=self.net, history=plan.history, recipe=recipe, before=before, after=after,
            target=Target(recipe.target, recipe.keep, self.pruner.left), metric=self.metric, latency=latency,
            seconds=plan.seconds, parts=plan.parts, stopped=plan.stopped,
            out=None if self.folder is None else self.folder.path, snapshots=snapshots,
        )  # fmt: skip
        if self.folder is not None:
            self.folder.finish(self.net, result.as_dict())
        return result

    def _info(self) -> dict[str, Any]:
        start, device = self.pruner.at_start, self.task.train.device
        return {
            "name": None, "method": self.recipe.method, "seed": self.recipe.seed, "metric": self.metric,
            "model": type(self.net).__qualname__, "recipe": self.recipe.as_dict(), "versions": versions(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
            "threads": torch.get_num_threads(), "execution": {"memory_format": self.memory_format},
            "start": None, "input": sample_of(self.inputs),
            "at_start": {
                "parameters": start.parameters, "neurons": start.neurons, "macs": start.macs // self.samples,
                "widths": {layer.name: layer.total for layer in self.neurons.layers},
            },
        } | self.about | {"features": self.features | self.about.get("features", {})}  # fmt: skip

    def tell(self, what: str, *args: Any) -> None:
        getattr(self.progress, what)(*args)

    def _note_once(self, text: str | None) -> None:
        if text is not None and text not in self._noted:
            self._noted.add(text)
            self.tell("note", text)

    # What a run can go on from

    def _last_good(self) -> str:
        if self.folder is None:
            return "no checkpoint was kept, as out was not given"
        return f"the last good checkpoint is {self.folder.checkpoint}, after {self.plan.epoch} epochs"

    def loaders(self) -> tuple[Any, ...]:
        return self.task.train.loader, None if self.task.val is None else self.task.val.loader

    def _save(self) -> None:
        if self.folder is None:
            return
        if self.plan.epoch == 0 or not self.folder.info.exists():  # someone may have moved the folder away
            self.folder.write_info(self._info())
        self.folder.keep(self._state())
        self.folder.write_metrics(self.plan.history)

    def _take_snapshot(self, value: float) -> None:
        """Keeps what snapshots.py fine-tunes later: the run as if its target had been met in the epoch that has just ended."""
        state, last = self._state(), self.plan.epoch - 1
        state["plan"] |= {"reached": last, "stopped": None, "parts": 0, "snapshots": {}}
        if self.folder is None:
            self.states[last] = checkpoint.packed(state)
        else:
            folder = self.folder.snapshot(value)
            folder.keep(state)
            folder.settle()  # before the run's own checkpoint, which takes it to be there

    def _state(self) -> dict[str, Any]:
        tensors, widths = described(self.net)
        scaler, scheduler = self.epochs.scaler, self.scheduler
        return {
            "net": {"tensors": tensors, "widths": widths},
            "neurons": self.neurons.state_dict(),
            "at_start": dataclasses.asdict(self.pruner.at_start),
            "plan": self.plan.state_dict(),
            "made_with": self.made_with,
            "execution": {"memory_format": self.memory_format},
            "optimizer": self.optimizer.state_dict(),
            "peaks": self.epochs.peaks,
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "flatness": self.scoring.state_dict(self.step_state),
            "streams": rng_state.take(*self.loaders()),
        }

    def _fill(self, stored: dict[str, Any]) -> None:
        try:
            changes = changes_to_fit(stored["net"]["widths"], stored["net"]["tensors"], self.net)
        except ValueError as error:
            raise InputError(f"resume: the run's checkpoint does not fit net: {error}") from None
        commit(changes)
        self._filled = changes

    def _restore(self, stored: dict[str, Any]) -> None:
        for name, now in self.made_with.items():
            was = stored["made_with"][name]
            if was != now:
                raise InputError(f"resume: the run began with {name} {was!r}, not {now!r}, and goes on only with that")
        if self.recipe.coupling == "coupled":
            self._fill(stored)
        for name in ("neurons", "plan", "optimizer"):
            getattr(self, name).load_state_dict(stored[name])
        self.scoring.load_state_dict(self.step_state, stored["flatness"])
        self.memory_format = stored["execution"]["memory_format"]
        self.epochs.peaks = stored["peaks"]
        if self.scheduler is not None:
            self.scheduler.load_state_dict(stored["scheduler"])
        if self.epochs.scaler is not None:
            self.epochs.scaler.load_state_dict(stored["scaler"])
        self.plan.parts += 1
        if self.folder is not None:
            if not self.folder.info.exists():
                self.folder.write_info(self._info())
            self.folder.write_metrics(self.plan.history)
        rng_state.put_back(stored["streams"], *self.loaders())
