"""`prune`, the one call: train, prune while training, fine-tune. The loop itself is `training/run.py`."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hgnp.curvature.autodiff.forward import Output, check_gradients
from hgnp.curvature.losses import Loss
from hgnp.curvature.validation import check_functions
from hgnp.errors import InputError, InputTypeError, first_line
from hgnp.io import runs
from hgnp.io.atomic import read_json
from hgnp.io.weights import load
from hgnp.progress import Bar, Lines, Progress, Silent
from hgnp.recipe import Recipe
from hgnp.result import Facts, Result, Snapshot, Target
from hgnp.state_guards import preserve_modes
from hgnp.training import checkpoint, rng_state
from hgnp.training.data import Batches, Unpack
from hgnp.training.evaluate import Accumulator, Metric
from hgnp.training.loop import Run
from hgnp.training.optimizers import OptimizerOrMaker
from hgnp.training.plan import history_of
from hgnp.training.run_folder import Folder
from hgnp.training.snapshots import Spare, finetuned
from hgnp.training.task import State, Task


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
    unpack: Unpack | None = None,
    output: Output | None = None,
    protect: Iterable[str] = (),
    device: str | torch.device | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    on_epoch: Callable[[State], object] | None = None,
    verbose: bool = True,
    _progress: Progress | None = None,
    _about: dict[str, Any] | None = None,
) -> Result:
    """Train `net` and prune it in place by `recipe`.

    Args:
        net: Any nn.Module that PyTorch can record. It stays the same object, with smaller tensors.
        train: A loader of batches, iterated anew every epoch.
        val: A loader of validation batches; without it there is no metric.
        recipe: How to train, prune and fine-tune: `hgnp.Recipe(keep=0.1)` leaves a tenth of the parameters.
        loss: loss(output, target) → a scalar, a mean over the batch.
        metric: metric(outputs, targets) over the whole validation set, higher is better, or an object with update(output,
            target), compute() and reset(), given batch by batch; accuracy for class labels.
        optimizer: An optimizer over the network's parameters, or what makes one from them; SGD by the recipe otherwise.
        scheduler: A learning-rate scheduler of that optimizer, or what makes one from it, stepped every epoch.
        unpack: unpack(batch) → (inputs, target), where batches are neither (x, y) nor mappings with `labels`.
        output: Picks the logits from what the network returns.
        protect: Names of layers, or of modules whose layers all stay.
        device: Where to train; the network's own device otherwise.
        out: The run's folder: checkpoint every epoch, metrics, the pruned model (docs/runs.md).
        resume: Continue the run in `out`, to the result it would have had; a finished one is returned.
        on_epoch: Called after every epoch; returning True ends the run there.
        verbose: Show progress on stderr: a bar on a terminal, one line per epoch elsewhere.

    Returns:
        The pruned network, one row per epoch, and what is known of the network before and after.
    """
    if not isinstance(net, nn.Module):
        raise InputTypeError(f"net: a {type(net).__name__} was given; an nn.Module would do")
    check_one_process(net)
    if not isinstance(recipe, Recipe):
        raise InputTypeError(f"recipe: a {type(recipe).__name__} was given; hgnp.Recipe(keep=0.1) would do")
    check_functions(
        loss=loss,
        metric=None if isinstance(metric, Accumulator) else metric,
        unpack=unpack,
        output=output,
        on_epoch=on_epoch,
    )
    for name, made in (("optimizer", optimizer), ("scheduler", scheduler)):
        if made is not None and not callable(made) and not hasattr(made, "step"):
            raise InputError(f"{name}: {made!r} was given; one, or its maker, would do")
    check_gradients()
    if device is not None:
        as_device(device)
    if next(net.parameters(), None) is None:
        raise InputError("net: it has no parameters")
    if resume and out is None:
        raise InputError("resume: True was given without out, the folder of the run to resume")
    recipe = recipe.resolved(scheduler=scheduler is not None)
    folder = None if out is None else Folder(out)
    with contextlib.nullcontext() if folder is None else folder.claimed(resume=resume):
        stored = None
        if folder is not None:
            if folder.info.exists():
                folder.check_recipe(recipe)
            if folder.finished:
                return finished(folder, net, recipe)
            stored = checkpoint.read(folder.checkpoint) if folder.checkpoint.exists() else None
        if recipe.seed is not None:
            rng_state.seed(recipe.seed)
        home = next(net.parameters()).device
        if device is not None:
            net.to(device)
        place = next(net.parameters()).device
        batches = Batches(train, "train", unpack, place)
        held_out = None if val is None else Batches(val, "val", unpack, place)
        progress = _progress or (Silent() if not verbose else Bar() if sys.stderr.isatty() else Lines(sys.stderr))
        run = Run(net, Task(batches, held_out, loss, metric, output), recipe, folder, progress, _about or {})
        try:
            spare = Spare.of(net, recipe, optimizer, scheduler, validated=val is not None) if recipe.snapshots else None
            run.prepare(stored, optimizer, scheduler, protect)
        except BaseException:
            run.take_back()
            if device is not None:
                net.to(home)
            raise
        try:
            with preserve_modes(net):
                run.train(on_epoch)
                return run.finish(() if spare is None else finetuned(run, spare))
        finally:
            run.tell("stop")


def check_one_process(net: nn.Module | None = None) -> None:
    """ValueError where several processes train together: each would prune other neurons than the rest."""
    for module in () if net is None else net.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise InputError("net must be a plain module, got one wrapped in DistributedDataParallel; give net.module")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        processes = torch.distributed.get_world_size()
    else:  # torchrun's, before a group is made
        given = os.environ.get("WORLD_SIZE", "")
        processes = int(given) if given.isdecimal() else 1
    if processes > 1:
        raise InputError(
            f"hgnp.prune must run in one process, got a world size of {processes}: data-parallel training is not supported "
            "yet; start it without torchrun"
        )


def finished(folder: Folder, net: nn.Module, recipe: Recipe) -> Result:
    """The result of a run that has ended, with its network in `net`."""
    stored = read_json(folder.result)
    if folder.checkpoint.exists():
        history = history_of(checkpoint.read(folder.checkpoint)["plan"])
    else:  # it is large, and a finished run can do without
        history = [dict(row) for row in runs.read(folder.path).rows]
    try:
        result = Result(
            model=net, history=history, recipe=recipe, before=Facts(**stored["before"]), after=Facts(**stored["after"]),
            target=Target(**stored["target"]), metric=stored["metric"], latency=stored["latency"],
            seconds=stored["seconds"], parts=stored["parts"], stopped=stored["stopped"], out=folder.path,
            snapshots=tuple(Snapshot(**each | {"path": folder.path / each["path"]}) for each in stored.get("snapshots", ())),
        )  # fmt: skip
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder.result}: damaged: {error}; without it, resume makes it anew") from None
    load(folder.model, net)
    return result


def as_device(device: str | torch.device) -> torch.device:
    """One that numbers can be on; ValueError if it is none, or is not here."""
    try:
        found = torch.device(device)
        torch.empty(1, device=found).cpu()  # a meta tensor has nothing to copy
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InputError(f"device: {device!s} was given; {first_line(error)}") from None
    return found
