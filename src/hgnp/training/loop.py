"""Algorithm 2: the training loop, with validation, checkpoints and measurements.

for epoch = 0, 1, …                                                          run_state.RunState
    if epoch ≥ E1 and epoch mod E2 = 0 and the target is not met:
        score neurons on a mini-batch, remove the N least important          pruner.Pruner
    train one epoch by Algorithm 1                                           trainer.Trainer
    validate, write a checkpoint                                             evaluate.Evaluation, run_folder.RunFolder
until E3 epochs after the one in which the target was met
"""

import dataclasses
import itertools
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hgnp.curvature.autodiff.forward import samples_in
from hgnp.curvature.batch_checks import check_labels, ignored_label
from hgnp.errors import DivergedError, InputError
from hgnp.flatness import flatness_of
from hgnp.io.weights import changes_to_fit, describe
from hgnp.progress import Progress
from hgnp.pruning import Neurons, Preview
from hgnp.pruning.config import update_config
from hgnp.pruning.surgery import Change, check_copies, commit
from hgnp.recipe import Recipe
from hgnp.reducer import average_statistics, broadcast_networks
from hgnp.result import NetworkStats, Result, Row, Snapshot, Target
from hgnp.training import checkpoint, rng_state, schedule
from hgnp.training.data import select_samples, with_checked_labels
from hgnp.training.evaluate import Evaluation
from hgnp.training.first_batch import check_first_batches
from hgnp.training.measure import Measurements, input_spec
from hgnp.training.memory_format import choose_memory_format, contiguous_layers, in_memory_format
from hgnp.training.optimizers import (
    OptimizerOrFactory,
    check_parameters,
    has_ended,
    make_optimizer,
    make_scheduler,
    needs_val_loss,
    scheduler_interval,
    step_scheduler,
)
from hgnp.training.pruner import Pruner
from hgnp.training.run_folder import RunFolder, versions
from hgnp.training.run_state import RunState, check_row
from hgnp.training.task import Callback, CallbackState, Task
from hgnp.training.trainer import Trainer, make_steps

Batch = tuple[Any, Any]


class TrainingLoop:
    """One run, from the first batch to the result.

    Call `prepare`, then `train`, then `finish`. If `prepare` fails, `undo_prepare` restores the network.
    """

    def __init__(
        self,
        net: nn.Module,
        task: Task,
        recipe: Recipe,
        folder: RunFolder | None,
        progress: Progress,
        about: dict[str, Any],
    ) -> None:
        self.net, self.task, self.recipe, self.folder, self.about = net, task, recipe, folder, about
        self.run_state = RunState(recipe)
        self.progress = progress
        self._loaded: list[Change] = []
        self._stored_epoch: int | None = None
        """Number of epochs that the last checkpoint holds."""
        self._noted: set[str] = set()
        self.states: dict[float, checkpoint.Packed] = {}
        """Without a folder: value of `recipe.snapshots` → the state that its snapshot resumes from."""

    def prepare(
        self,
        stored: dict[str, Any] | None,
        optimizer: OptimizerOrFactory | None,
        scheduler: Any,
        protect: Iterable[str],
        also: Iterable[nn.Module] = (),
    ) -> None:
        """Check the first batches and build everything that trains. `stored`: the checkpoint to resume from, if any."""
        net, task, recipe, reducer = self.net, self.task, self.recipe, self.task.reducer
        self.also = check_copies(net, also)
        broadcast_networks(reducer, net, *self.also)
        first = check_first_batches(net, task, reducer)
        self.task = task = dataclasses.replace(task, loss_needs_training_mode=first.loss_needs_training_mode)
        inputs, target = first.inputs, first.target
        self.classes, self.val_classes = first.classes, first.val_classes
        self.metric, self.features = first.metric, first.features
        self.inputs, self._contiguous = inputs, contiguous_layers(net)
        self.measurements = Measurements(net, task, self.run_state, (inputs, target), first.val)
        if stored is not None and recipe.coupling == "paper":  # its couplings depend on what was removed
            self._load_network(stored)
        two = select_samples(inputs, torch.arange(min(2, samples_in(inputs))))
        self.samples = samples_in(two)
        if isinstance(protect, Iterable) and not isinstance(protect, str):  # Neurons refuses anything else
            protect = list(protect)
        self.neurons = Neurons(net, two, protect=protect, approximate=recipe.approximate)
        at_start = self.neurons.preview({}) if stored is None else Preview(**stored["at_start"])
        self.optimizer = make_optimizer(net, recipe, optimizer)
        self.scheduler = make_scheduler(self.optimizer, recipe, scheduler, validated=task.val is not None)
        self.scheduler_interval = scheduler_interval(self.scheduler, recipe)
        self.setup: dict[str, Any] = {
            "optimizer": type(self.optimizer).__name__,
            "scheduler": None if self.scheduler is None else type(self.scheduler).__name__,
            "parameter groups": len(self.optimizer.param_groups),
            "protect": sorted(protect),
            "networks in also": len(self.also),
            "batches per epoch": task.train.length,
            "accumulate": task.accumulate,
            "batches per global batch": task.train.loader_batches,
        }
        step, self.scoring_step, self.step_state = make_steps(net, task, recipe, reducer)
        self.trainer = Trainer(
            step, self.step_state, self.optimizer, recipe, task.train.device, accumulate=task.accumulate
        )
        graphs = self.trainer.executor.uses_graphs
        self.evaluation = Evaluation(
            net,
            task.loss,
            task.metric,
            task.output,
            graphs=graphs and not task.loss_needs_training_mode,
            loss_needs_training_mode=task.loss_needs_training_mode,
            reducer=reducer,
        )
        self.pruner = Pruner(
            self.neurons,
            self.scoring_step,
            self.step_state,
            recipe,
            self.optimizer,
            at_start,
            self.also,
            loss_needs_training_mode=task.loss_needs_training_mode,
        )
        self.flatness = flatness_of(self.scoring_step, self.step_state)
        self._format_note: str | None = None
        if stored is not None:
            self._restore(stored)
        else:
            self.pruner.check_reachable()
            self.pruner.check_scores((inputs, target))
            if self.run_state.switched is not None:  # method "hybrid" may never use the penalty
                self.trainer.check_derivatives((inputs, target))
            with rng_state.preserved():
                chosen = reducer.on_rank_zero(
                    lambda: json.dumps(choose_memory_format(net, task, recipe, (inputs, target))).encode()
                )
            self.memory_format, self._format_note = json.loads(chosen)
            self._write_checkpoint()
        self._loaded = []

    def undo_prepare(self) -> None:
        """Restore the networks, if they were loaded from a checkpoint that then did not fit."""
        for change in reversed(self._loaded):
            change.undo()

    # Algorithm 2

    def train(self, on_step: Callback | None = None, on_epoch: Callback | None = None) -> None:
        run = self.run_state
        self.progress.start(self._info() | {"epochs_done": run.epoch, "out": self.folder and str(self.folder.path)})
        for note in (self._format_note, self.measurements.note):
            self._note_once(note)
        with self.trainer.running(), in_memory_format(self.net, self.optimizer, self.memory_format, self._contiguous):
            while self._unfinished():
                self._run_epoch(on_step, on_epoch)

    def _run_epoch(self, on_step: Callback | None, on_epoch: Callback | None) -> None:
        """Train one epoch, call `on_epoch`, write a checkpoint."""
        run, start = self.run_state, time.perf_counter()
        before = self._before_rounds()
        row = self._train_epoch(on_step)
        row["seconds"] = time.perf_counter() - start
        run.history.append(row)
        run.seconds += row["seconds"]
        passed = run.record_snapshots(self.pruner.left)
        run.epoch += 1
        stop = on_epoch is not None and on_epoch(self._callback_state(row["epoch"], row=row)) is True
        check_row(row)
        if on_epoch is not None and self.task.reducer.any_rank(stop):
            run.stopped = f"on_epoch stopped the run after epoch {row['epoch']}"
        if passed:
            self._take_snapshots(passed, before)
        self._write_checkpoint()
        recent = [row["seconds"] for row in run.history[-3:]]
        epochs = self._epochs_left() + len(self.recipe.snapshots) * (1 + self.recipe.finetune_epochs)
        self.progress.epoch(row, epochs * sum(recent) / len(recent) if self._unfinished() else None)

    def _callback_state(self, epoch: int, *, step: int | None = None, row: Row | None = None) -> CallbackState:
        return CallbackState(
            epoch, step, row or {}, self.run_state.history, self.net, self.optimizer, self.neurons, self.flatness
        )

    def _unfinished(self) -> bool:
        self.run_state.mark_target_met(self.pruner.left)
        return not self.run_state.done

    def _train_epoch(self, on_step: Callback | None) -> Row:
        run, recipe, train, reducer = self.run_state, self.recipe, self.task.train, self.task.reducer
        check_parameters(self.optimizer, self.net, "a callback must leave the network's parameters in place")
        rng_state.seed_ranks(reducer, run.epoch)
        if has_ended(self.scheduler):
            self._note_once(
                "scheduler: OneCycleLR has taken all its steps and stays at its last learning rate; the recipe's "
                'schedule="one_cycle" adapts to the length of a run'
            )
        rng_state.prepare_epoch(train.loader, run.epoch)
        batches: Iterator[Batch] = iter(train)
        removed = 0
        if run.round_due:
            first = list(itertools.islice(batches, recipe.score_batches))
            removed = self._prune_round(first)
            batches = itertools.chain(first, batches)
        by_steps = run.pruning and recipe.prune_unit == "steps"
        recent: list[Batch] = []

        def before_batch(batch: Batch) -> None:
            if run.epoch == 0 and self.classes is not None:
                check_labels(self.task.loss, batch[1], self.classes, "train")
            if by_steps:
                recent[:] = [*recent, batch][-recipe.score_batches :]

        def before_step(_: Batch) -> None:
            nonlocal removed
            if by_steps and run.pruning_ended is None:
                if run.steps % recipe.prune_every == 0:
                    removed += self._prune_round(recent)
                run.steps += 1

        def after_step(step: int) -> bool:
            if self.scheduler is not None and self.scheduler_interval == "step":
                self._note_once(step_scheduler(self.scheduler, None))
            if on_step is None:
                return False
            if not reducer.any_rank(on_step(self._callback_state(run.epoch, step=step)) is True):
                return False
            run.stopped = f"on_step stopped the run in epoch {run.epoch}, step {step}"
            return True

        since, (start, end) = 0.0, run.advance(self._epochs_left())

        def rate(share: float) -> float:
            nonlocal since, start, end
            position = start + (end - start) * (share - since) / (1 - since)
            if run.ends_this_epoch and run.position < 1:  # a round in this epoch has just met the target
                since, start, end = share, position, 1.0
                run.position = 1.0
            return schedule.factor(recipe, position)

        try:
            statistics = self.trainer.train(
                batches, total=train.count, epoch=run.epoch, rate=None if recipe.schedule == "constant" else rate, mu=run.mu,
                before_batch=before_batch, before_step=before_step, after_step=after_step,
                show=lambda batch, loss: self.progress.batch(run.epoch, batch, train.count, loss),
            )  # fmt: skip
        except DivergedError as error:
            raise DivergedError(f"{error}; {self._last_checkpoint()}; {self._divergence_hint()}") from None
        if run.epoch == 0 and recipe.keep < 1:  # not only in the first round: the optimizer has its state now
            self.neurons.check_optimizer(self.optimizer)
        self._note_once(train.note)
        average_statistics(reducer, self.net, *self.also)
        due = run.validation_due
        val_loss, metric = self._validate() if due else (None, None)
        if (
            self.scheduler is not None
            and self.scheduler_interval == "epoch"
            and (due or not needs_val_loss(self.scheduler))
        ):
            self._note_once(step_scheduler(self.scheduler, val_loss))
        return self._row(statistics.summary(recipe.bound), removed, val_loss, metric)

    def _divergence_hint(self) -> str:
        """A batch in which every label is ignored has a NaN loss but a zero gradient: it leaves the weights finite."""
        ignored = ignored_label(self.task.loss)
        if self.classes is None or ignored is None or not all(bool(p.isfinite().all()) for p in self.net.parameters()):
            return "a smaller lr or mu may help, if the data are finite"
        return f"all weights are finite; leave out batches in which every label is ignored (ignore_index={ignored})"

    def _prune_round(self, batches: list[Batch]) -> int:
        """Remove neurons, fewer if the target needs fewer; returns how many."""
        if self.run_state.before is None:
            self.run_state.before = dataclasses.asdict(self._stats())
        frozen = {entry.name for entry in self.neurons.frozen}
        removed = self.pruner.round(batches)
        for entry in self.neurons.frozen:
            if entry.name not in frozen:  # with coupling "paper" the network is traced again
                self.progress.note(f"{entry.name}: its {entry.count} neurons can no longer be removed: {entry.reason}")
        self.run_state.last_round = self.run_state.epoch
        self.run_state.update_switch(self.neurons.kept)
        if not removed or self.pruner.left <= self.recipe.keep:
            self.run_state.pruning_ended = self.run_state.epoch
        if not removed:
            reason = self.pruner.problem or "the rest is frozen or the last of its layer"
            self.progress.note(f"no more neurons can be removed: {reason}")
        return removed

    def _epochs_left(self) -> int:
        return self.run_state.epochs_left(
            left=self.pruner.left, neurons=self.neurons.count, at_start=self.pruner.at_start.neurons,
            steps=self.task.steps,
        )  # fmt: skip

    # Validation, measurements, result

    def _validate(self) -> tuple[float | None, float | None]:
        task = self.task
        if task.val is None:
            return None, None
        rng_state.prepare_epoch(task.val.loader, self.run_state.epoch)
        known = any(row["val_loss"] is not None for row in self.run_state.history)
        values = self.evaluation(
            task.val if known else with_checked_labels(task.val, task.loss, self.val_classes, "val")
        )
        self._note_once(self.evaluation.note)
        return values

    def _row(self, summary: Row, removed: int, val_loss: float | None, metric: float | None) -> Row:
        now = self.neurons.preview({})
        return {"epoch": self.run_state.epoch, "phase": self.run_state.phase} | summary | {
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

    def _stats(self) -> NetworkStats:
        """The network after the last epoch, or before the first."""
        history, val = self.run_state.history, self.task.val
        if not history:
            val_loss, metric = self._validate()
        else:
            if val is not None and history[-1]["val_loss"] is None and history[-1]["metric"] is None:
                with rng_state.preserved(val.loader):
                    history[-1]["val_loss"], history[-1]["metric"] = self._validate()
            val_loss, metric = history[-1]["val_loss"], history[-1]["metric"]
        now = self.neurons.preview({})
        stats = NetworkStats(metric, val_loss, now.parameters, now.neurons, now.macs // self.samples)
        with rng_state.preserved():
            return self.measurements.with_sharpness(stats, self.net)

    def finish(self, snapshots: tuple[Snapshot, ...] = ()) -> Result:
        with self.trainer.running():
            return self._finish(snapshots)

    def _finish(self, snapshots: tuple[Snapshot, ...]) -> Result:
        run, recipe = self.run_state, self.recipe
        if self.folder is not None:
            self.folder.flush()  # latencies are measured while nothing is being written
        after = self._stats()
        if self.folder is not None:
            self.folder.write_metrics(run.history)  # the last epoch may have been validated only now
        before = NetworkStats(**run.before) if run.before is not None else after
        before, after, latency = self._measured_on_rank_zero(before, after)
        if run.pruning_ended is not None and self.pruner.left > recipe.keep:
            run.stopped = run.stopped or "no more neurons could be removed"
        result = Result(
            model=self.net, history=run.history, recipe=recipe, before=before, after=after,
            target=Target(recipe.target, recipe.keep, self.pruner.left), metric=self.metric, latency=latency,
            seconds=run.seconds, parts=run.parts, stopped=run.stopped,
            out=None if self.folder is None else self.folder.path, snapshots=snapshots,
        )  # fmt: skip
        for network in (self.net, *self.also):  # also of a run that was resumed after its last removal
            update_config(network)
        if self.folder is not None:
            self.folder.finish(self.net, result.as_dict(), self.also)
        return result

    def _measured_on_rank_zero(
        self, before: NetworkStats, after: NetworkStats
    ) -> tuple[NetworkStats, NetworkStats, dict[str, Any] | None]:
        """Both with their latencies, and how those were measured: on rank 0, while the others wait."""

        def encoded() -> bytes:
            full, pruned, latency = self.measurements.with_latency(before, after, self.net)
            return json.dumps([dataclasses.asdict(full), dataclasses.asdict(pruned), latency]).encode()

        full, pruned, latency = json.loads(self.task.reducer.on_rank_zero(encoded))
        return NetworkStats(**full), NetworkStats(**pruned), latency

    def _info(self) -> dict[str, Any]:
        start, device = self.pruner.at_start, self.task.train.device
        return {
            "name": None, "method": self.recipe.method, "seed": self.recipe.seed, "metric": self.metric,
            "model": type(self.net).__qualname__, "recipe": self.recipe.as_dict(), "versions": versions(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
            "threads": torch.get_num_threads(), "ranks": self.task.reducer.ranks,
            "execution": {"memory_format": self.memory_format},
            "start": None, "input": input_spec(self.inputs),
            "at_start": {
                "parameters": start.parameters, "neurons": start.neurons, "macs": start.macs // self.samples,
                "widths": {layer.name: layer.total for layer in self.neurons.layers},
            },
        } | self.about | {"features": self.features | self.about.get("features", {})}  # fmt: skip

    def _note_once(self, text: str | None) -> None:
        if text is not None and text not in self._noted:
            self._noted.add(text)
            self.progress.note(text)

    # Checkpoints

    def _last_checkpoint(self) -> str:
        if self.task.reducer.rank > 0:
            return "rank 0 names the last good checkpoint"
        if self.folder is None:
            return "there is no checkpoint, as out is not set"
        return f"the last good checkpoint is {self.folder.checkpoint}, after {self._stored_epoch} epochs"

    def loaders(self) -> tuple[Any, ...]:
        return self.task.train.loader, None if self.task.val is None else self.task.val.loader

    def _write_checkpoint(self) -> None:
        """The history so far, and a checkpoint if one is due."""
        if self.folder is None:
            return
        if self.run_state.epoch == 0 or not self.folder.info.exists():  # the folder may have been moved away
            self.folder.write_info(self._info())
        if self.run_state.epoch % self.recipe.checkpoint_every == 0 or not self._unfinished():
            self.folder.write_checkpoint(self._state())
            self._stored_epoch = self.run_state.epoch
        self.folder.write_metrics(self.run_state.history)

    def _before_rounds(self) -> checkpoint.Packed | None:
        """The state before this epoch, if its rounds may reach a snapshot and the last checkpoint does not have it."""
        run = self.run_state
        pending = run.pruning and len(run.snapshots) < len(self.recipe.snapshots)
        if not pending or self._stored_epoch == run.epoch or self.task.reducer.rank:
            return None
        return checkpoint.pack(self._state())

    def _take_snapshots(self, values: Iterable[float], before: checkpoint.Packed | None) -> None:
        """Store the state before the epoch whose rounds reached `values`; snapshots.py resumes from it, with `keep` at each of
        them. Called before that epoch's own checkpoint is written."""
        if self.task.reducer.rank:
            return  # rank 0's is sent to all when it is due
        if before is not None:
            state = checkpoint.unpack(before)
        else:
            assert self.folder is not None
            self.folder.flush()
            state = checkpoint.read(self.folder.checkpoint)
        state["networks"], state["setup"] = state["networks"][:1], state["setup"] | {"networks in also": 0}
        state["run"] |= {"parts": 0, "snapshots": {}}
        for value in values:
            if self.folder is None:
                self.states[value] = checkpoint.pack(state)
            else:
                folder = self.folder.snapshot(value)
                folder.write_checkpoint(state)
                folder.flush()  # before the run's own checkpoint, which relies on it

    def _state(self) -> dict[str, Any]:
        scaler, scheduler = self.trainer.scaler, self.scheduler
        return {
            "networks": [
                dict(zip(("tensors", "widths"), describe(net), strict=True)) for net in (self.net, *self.also)
            ],
            "neurons": self.neurons.state_dict(),
            "at_start": dataclasses.asdict(self.pruner.at_start),
            "run": self.run_state.state_dict(),
            "setup": self.setup,
            "batches": self.task.train.count,
            "execution": {"memory_format": self.memory_format},
            "optimizer": self.optimizer.state_dict(),
            "peaks": list(self.trainer.peaks),
            "scheduled": list(self.trainer.scheduled),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "flatness": self.scoring_step.state_dict(self.step_state),
            "rng": rng_state.capture(*self.loaders()),
        }

    def _load_network(self, stored: dict[str, Any]) -> None:
        """Load the stored weights into net and the networks in `also`. `_restore` checks that their number is the same."""
        changes: list[Change] = []
        names = ["net", *(f"also[{place}]" for place in range(len(self.also)))]
        for name, net, saved in zip(names, (self.net, *self.also), stored["networks"], strict=False):
            try:
                changes += changes_to_fit(saved["widths"], saved["tensors"], net)
            except ValueError as error:
                raise InputError(f"resume: {name} must fit the run's checkpoint: {error}") from None
        commit(changes)
        self._loaded = changes

    def _restore(self, stored: dict[str, Any]) -> None:
        groups = len(stored["optimizer"]["param_groups"])  # a callback may have added some
        for name, now in self.setup.items():
            was = groups if name == "parameter groups" else stored["setup"].get(name, now)
            if (
                name == "batches per epoch"
                and was
                and now
                and abs(was - now) == 1
                and self.task.train.loader_batches > 1
            ):
                continue  # with other ranks, a small last batch is dropped or is not
            if was != now:
                raise InputError(f"resume: {name} must be {was!r} as when the run started, got {now!r}")
        train = self.task.train
        if train.length is None:  # schedules follow the number of batches of the epoch before
            train.count = stored.get("batches")
        if self.recipe.coupling == "coupled":
            self._load_network(stored)
        try:
            self.neurons.load_state_dict(stored["neurons"])
        except ValueError as error:
            raise InputError(f"resume: net must be as when the run started: {error}") from None
        self.run_state.load_state_dict(stored["run"])
        self.optimizer.load_state_dict(stored["optimizer"])
        self.scoring_step.load_state_dict(self.step_state, stored["flatness"])
        self.memory_format = stored["execution"]["memory_format"]
        self.trainer.peaks = stored["peaks"]
        self.trainer.scheduled = stored.get("scheduled") or [float(g["lr"]) for g in self.optimizer.param_groups]
        if self.scheduler is not None:
            self.scheduler.load_state_dict(stored["scheduler"])
        if self.trainer.scaler is not None:
            self.trainer.scaler.load_state_dict(stored["scaler"])
        self.run_state.parts += 1
        if self.folder is not None:
            self._stored_epoch = self.run_state.epoch
            if not self.folder.info.exists():
                self.folder.write_info(self._info())
            self.folder.write_metrics(self.run_state.history)
        rng_state.restore(stored["rng"], *self.loaders())
