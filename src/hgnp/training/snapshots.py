"""Snapshots: networks at intermediate κ, each fine-tuned separately after the run has ended.

When a round reaches a value of `recipe.snapshots`, `TrainingLoop` stores the state that it had before that epoch. A copy of the
full-size network resumes from there with `keep` at that value: it repeats the round, which now stops at its own target, and is
fine-tuned to its own end. The run itself is not affected: network and optimizer are copies, RNG state and loaders are restored.
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
from hgnp.training.loop import TrainingLoop
from hgnp.training.optimizers import OptimizerOrFactory, make_optimizer, make_scheduler


@dataclass(frozen=True)
class InitialCopy:
    """A full-size copy of the network with its own optimizer and scheduler, from which a snapshot is resumed."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any

    @classmethod
    def create(
        cls, net: nn.Module, recipe: Recipe, optimizer: OptimizerOrFactory | None, scheduler: Any, *, validated: bool
    ) -> "InitialCopy":
        """Copy before the run starts, so that anything that cannot be copied is refused early."""
        ours = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        theirs = scheduler if hasattr(scheduler, "step") and not isinstance(scheduler, type) else None
        try:
            net, ours, theirs = copy.deepcopy((net, ours, theirs))
        except Exception as error:
            raise InputError(
                f"net, optimizer and scheduler must work with copy.deepcopy to take snapshots, but failed: {brief(error)}"
            ) from error
        made = make_optimizer(net, recipe, optimizer if ours is None else ours)
        return cls(
            net, made, make_scheduler(made, recipe, scheduler if theirs is None else theirs, validated=validated)
        )


class SnapshotProgress:
    """Reports the progress of a snapshot as part of its run's."""

    def __init__(self, outer: Progress, name: str) -> None:
        self._outer, self._name = outer, name
        self.batch, self.epoch = outer.batch, outer.epoch

    def start(self, info: Mapping[str, Any]) -> None:
        self._outer.note(f"{self._name}: resumes after {info['epochs_done']} epochs")

    def note(self, text: str) -> None:
        self._outer.note(f"{self._name}: {text}")

    def stop(self) -> None: ...


def finetune_snapshots(loop: TrainingLoop, initial: InitialCopy) -> tuple[Snapshot, ...]:
    """Fine-tune a finished run's snapshots, from large κ to small. One whose loss diverges, or that no longer
    fits the network as it was given, is left out with a note."""
    snapshots: list[Snapshot] = []
    epochs = loop.run_state.snapshots
    with rng_state.preserved(*loop.loaders()):
        for value in loop.recipe.snapshots:
            if value not in epochs:
                loop.progress.note(f"snapshot {value:g} is left out: the run ended with {loop.pruner.left:.2%} left")
                continue
            try:
                snapshots.append(_finetune(loop, initial, value, epochs[value]))
            except (DivergedError, InputError) as error:
                loop.progress.note(f"snapshot {value:g} is left out: {error}")
    return tuple(snapshots)


def _finetune(loop: TrainingLoop, initial: InitialCopy, value: float, epoch: int) -> Snapshot:
    folder = None if loop.folder is None else loop.folder.snapshot(value)

    def read() -> dict[str, Any]:
        if folder is None:
            return {"state": checkpoint.unpack(loop.states.pop(value))}
        if folder.finished:  # before the run was interrupted and resumed
            return {"result": read_json(folder.result)}
        return {"state": checkpoint.read(folder.checkpoint)}

    stored = checkpoint.from_rank_zero(loop.task.reducer, read)
    assert stored is not None
    if "result" in stored:
        return _snapshot(loop, stored["result"], epoch, path=None if folder is None else folder.path)
    own = copy.deepcopy(initial)
    recipe = replace(loop.recipe, keep=value, snapshots=(), measure="none")  # `hgnp bench` times it
    own_loop = TrainingLoop(
        own.net, loop.task, recipe, folder, SnapshotProgress(loop.progress, f"snapshot {value:g}"), loop.about
    )
    try:
        own_loop.prepare(stored["state"], own.optimizer, own.scheduler, loop.setup["protect"])
        with preserve_modes(own.net):
            own_loop.train()
            result = own_loop.finish()
    finally:
        if folder is not None:
            folder.flush()
    if folder is None:
        return _snapshot(loop, result.as_dict(), epoch, model=own.net)
    folder.checkpoint.unlink()  # large, and no longer needed
    return _snapshot(loop, result.as_dict(), epoch, path=folder.path)


def _snapshot(loop: TrainingLoop, result: Mapping[str, Any], epoch: int, **where: Any) -> Snapshot:
    after, target = result["after"], result["target"]
    return Snapshot(
        asked=target["asked"], got=target["got"], kept=after["parameters"] / loop.pruner.at_start.parameters,
        metric=after["metric"], val_loss=after["loss"], parameters=after["parameters"], neurons=after["neurons"],
        macs=after["macs"], epoch=epoch, epochs=result["epochs"] - epoch - 1, **where,
    )  # fmt: skip
