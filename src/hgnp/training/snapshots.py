"""Snapshots: the network at intermediate κ, each fine-tuned by itself once the run has ended.

After the epoch in which a round comes down to a value of `recipe.snapshots`, `Run` keeps its whole state, as if its target had
been met in that epoch. A copy of the full-size network goes on from there, as a resumed run would, to its own end. The run
itself does not notice: network and optimizer are copies, random streams and loaders are put back.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hgnp.errors import DivergedError, InputError, brief
from hgnp.io.atomic import read_json
from hgnp.progress import Progress
from hgnp.recipe import Recipe
from hgnp.result import Snapshot
from hgnp.state_guards import preserve_modes
from hgnp.training import checkpoint, rng_state
from hgnp.training.loop import Run
from hgnp.training.optimizers import OptimizerOrMaker, make_optimizer, make_scheduler


@dataclass(frozen=True)
class Spare:
    """A full-size copy of the network with an optimizer and a scheduler of its own, to begin a snapshot from."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any

    @classmethod
    def of(
        cls, net: nn.Module, recipe: Recipe, optimizer: OptimizerOrMaker | None, scheduler: Any, *, validated: bool
    ) -> "Spare":
        """Before the run begins, so that what cannot be copied or made twice is refused then."""
        ours = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        theirs = scheduler if hasattr(scheduler, "step") and not isinstance(scheduler, type) else None
        try:
            net, ours, theirs = copy.deepcopy((net, ours, theirs))
        except Exception as error:
            raise InputError(
                f"snapshots need a network, optimizer and scheduler that copy.deepcopy can copy: {brief(error)}"
            ) from error
        made = make_optimizer(net, recipe, optimizer if ours is None else ours)
        return cls(
            net, made, make_scheduler(made, recipe, scheduler if theirs is None else theirs, validated=validated)
        )


class Within:
    """The progress of a snapshot, as that of the run it is from."""

    def __init__(self, outer: Progress, name: str) -> None:
        self._outer, self._name = outer, name
        self.step, self.epoch = outer.step, outer.epoch

    def start(self, info: Mapping[str, Any]) -> None:
        self._outer.note(f"{self._name}: fine-tuning starts after {info['epochs_done']} epochs")

    def note(self, text: str) -> None:
        self._outer.note(f"{self._name}: {text}")

    def stop(self) -> None: ...


def finetuned(run: Run, spare: Spare) -> tuple[Snapshot, ...]:
    """The snapshots of a run that has ended, from large κ to small. One whose loss diverges is left out, with a note."""
    found: list[Snapshot] = []
    epochs = run.plan.snapshots
    with rng_state.untouched(*run.loaders()):
        for epoch in sorted(set(epochs.values())):
            values = [value for value in run.recipe.snapshots if epochs.get(value) == epoch]
            try:
                first = _finetuned(run, spare, values[0], epoch)
            except DivergedError as error:
                run.tell("note", f"snapshot {values[0]:g} is left out: {error}")
                continue
            found += [replace(first, asked=value) for value in values]
    for value in run.recipe.snapshots:
        if value not in epochs:
            run.tell("note", f"snapshot {value:g} is left out: the run ended with {run.pruner.left:.2%} left")
    return tuple(found)


def _finetuned(run: Run, spare: Spare, value: float, epoch: int) -> Snapshot:
    folder = None if run.folder is None else run.folder.snapshot(value)
    if folder is not None and folder.finished:  # before the run was interrupted
        return _snapshot(run, read_json(folder.result), epoch, path=folder.path)
    stored = checkpoint.unpacked(run.states.pop(epoch)) if folder is None else checkpoint.read(folder.checkpoint)
    own = copy.deepcopy(spare)
    recipe = replace(run.recipe, keep=value, snapshots=(), measure="none")  # `hgnp bench` times it
    part = Run(own.net, run.task, recipe, folder, Within(run.progress, f"snapshot {value:g}"), run.about)
    try:
        part.prepare(stored, own.optimizer, own.scheduler, run.made_with["protect"])
        with preserve_modes(own.net):
            part.train(None)
            result = part.finish()
    finally:
        if folder is not None:
            folder.settle()
    if folder is None:
        return _snapshot(run, result.as_dict(), epoch, model=own.net)
    folder.checkpoint.unlink()  # large, and of no more use
    return _snapshot(run, result.as_dict(), epoch, path=folder.path)


def _snapshot(run: Run, result: Mapping[str, Any], epoch: int, **where: Any) -> Snapshot:
    after, target = result["after"], result["target"]
    return Snapshot(
        asked=target["asked"], got=target["got"], kept=after["parameters"] / run.pruner.at_start.parameters,
        metric=after["metric"], val_loss=after["loss"], parameters=after["parameters"], neurons=after["neurons"],
        macs=after["macs"], epoch=epoch, epochs=result["epochs"] - epoch - 1, **where,
    )  # fmt: skip
