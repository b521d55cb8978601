"""`prune`: train, prune during training and fine-tune in one call. The loop itself is `training/loop.py`."""

import contextlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgnp.curvature.autodiff.forward import Output, check_gradients
from hgnp.curvature.losses import Loss
from hgnp.curvature.validation import check_functions, check_takes_one
from hgnp.errors import InputError, InputTypeError, first_line
from hgnp.execution.process_group import created_group, device_of_rank, failures_announced, join_ranks
from hgnp.io import runs
from hgnp.io.atomic import read_json
from hgnp.io.weights import changes_to_fit, read_saved
from hgnp.progress import BarProgress, LineProgress, Progress, SilentProgress
from hgnp.pruning.config import update_config
from hgnp.pruning.surgery import Change, check_copies, commit
from hgnp.recipe import Recipe
from hgnp.result import NetworkStats, Result, Snapshot, Target
from hgnp.state_guards import preserve_modes
from hgnp.training import checkpoint, rng_state
from hgnp.training.data import Batches, Unpack
from hgnp.training.evaluate import Accumulator, Metric
from hgnp.training.loop import TrainingLoop
from hgnp.training.optimizers import OptimizerOrFactory
from hgnp.training.run_folder import RunFolder
from hgnp.training.run_state import read_history
from hgnp.training.snapshots import InitialCopy, finetune_snapshots
from hgnp.training.task import Callback, Task
from hgnp.validation import check_flags, check_module, check_net, check_values


def prune(
    net: nn.Module,
    train: Iterable[Any],
    val: Iterable[Any] | None = None,
    *,
    recipe: Recipe,
    loss: Loss = F.cross_entropy,
    metric: Metric | None = None,
    optimizer: OptimizerOrFactory | None = None,
    scheduler: Any = None,
    unpack: Unpack | None = None,
    output: Output | None = None,
    protect: Iterable[str] = (),
    also: Iterable[nn.Module] = (),
    device: str | torch.device | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    on_step: Callback | None = None,
    on_epoch: Callback | None = None,
    accumulate: int = 1,
    verbose: bool = True,
) -> Result:
    """Train `net` and prune it in place by `recipe`: Algorithm 2 of the paper.

    >>> import torch, hgnp
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> train = val = [(torch.randn(16, 4), torch.arange(16) % 2)]  # or DataLoaders
    >>> recipe = hgnp.Recipe(keep=0.5, warmup_epochs=1, neurons_per_round=4, finetune_epochs=1, seed=0)
    >>> result = hgnp.prune(net, train, val, recipe=recipe, out="runs/mine", verbose=False)
    >>> result.kept, net[0].weight.shape
    (0.396..., torch.Size([3, 4]))

    Args:
        net: Any nn.Module that PyTorch can trace. It stays the same object, with smaller tensors.
        train: A loader of training batches; every epoch iterates over it once.
        val: A loader of validation batches. Without it there is no validation loss and no metric.
        recipe: How to train, prune and fine-tune: `hgnp.Recipe(keep=0.1)` keeps a tenth of the parameters.
        loss: loss(output, target) → a scalar, the mean over the batch.
        metric: metric(outputs, targets) over the whole validation set, in any structure of tensors, higher is better; or an
            object with update(output, target), compute() and reset(), such as those of torchmetrics, which is updated batch by
            batch. Default: accuracy for class labels, else minus the validation loss.
        optimizer: An optimizer over the network's parameters, or a function that takes the parameters and returns one.
            Default: SGD with the recipe's settings.
        scheduler: A learning-rate scheduler of that optimizer, or a function that takes the optimizer and returns one. It is
            stepped after every epoch, OneCycleLR and CyclicLR after every step of the optimizer (`recipe.scheduler_interval`),
            and replaces `recipe.schedule`.
        unpack: unpack(batch) → (inputs, target). Default: (x, y) pairs, and mappings with `labels`.
        output: Picks the logits from what the network returns, e.g. ``lambda o: o.logits``.
        protect: Names of layers that keep all their neurons; the name of a module protects every layer in it.
        also: Networks of the same shape as `net`, such as an EMA copy. They lose the same neurons, and are part of the
            checkpoint; `on_step` is the place to update them.
        device: The device to train on. Default: the network's own.
        out: The run's folder: a checkpoint every epoch, metrics, the pruned model (docs/runs.md).
        resume: Continue the run in `out` to the result that it would have had without the interruption. A finished run is
            loaded.
        on_step: on_step(state) is called after every step of the optimizer; returning True stops the run. `state` has `epoch`,
            `step`, `net`, `optimizer`, `neurons`, `flatness` and `history`.
        on_epoch: on_epoch(state) is called after every epoch, with the epoch's `row` of the history too; returning True stops
            the run.
        accumulate: Batches per step of the optimizer. Its gradient is their mean, weighted by samples (or by labels that are
            not ignored, or class weights), as for one large batch; each batch has its own batch-norm statistics and penalty.
            The last step of an epoch takes the batches that are left.
        verbose: Show progress on stderr: a bar on a terminal, one line per epoch elsewhere.

    Returns:
        The pruned network, its history with one row per epoch, and measurements before and after pruning.

    In a process group of torch.distributed, and under torchrun, the ranks train one network together (docs/distributed.md):
    each gets a part of every batch, and rank 0 writes and shows progress. DistributedDataParallel is unwrapped.

    Raises:
        OSError: `out` holds a run already (`FileExistsError`), or cannot be written.
        HgnpError: Arguments that do not fit together (also a ValueError or TypeError), a loss that is no longer finite
            (`DivergedError`), or another rank that failed (`RankError`).
    """
    check_flags(verbose=verbose)
    return prune_and_report(
        net, train, val, progress=_default_progress(verbose=verbose), recipe=recipe, loss=loss, metric=metric,
        optimizer=optimizer, scheduler=scheduler, unpack=unpack, output=output, protect=protect, also=also, device=device,
        out=out, resume=resume, on_step=on_step, on_epoch=on_epoch, accumulate=accumulate,
    )  # fmt: skip


def prune_and_report(
    net: nn.Module,
    train: Iterable[Any],
    val: Iterable[Any] | None = None,
    *,
    progress: Progress,
    about: Mapping[str, Any] | None = None,
    recipe: Recipe,
    loss: Loss = F.cross_entropy,
    metric: Metric | None = None,
    optimizer: OptimizerOrFactory | None = None,
    scheduler: Any = None,
    unpack: Unpack | None = None,
    output: Output | None = None,
    protect: Iterable[str] = (),
    also: Iterable[nn.Module] = (),
    device: str | torch.device | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    on_step: Callback | None = None,
    on_epoch: Callback | None = None,
    accumulate: int = 1,
) -> Result:
    """`prune`, reporting to `progress`. `about`: further entries of run.json, such as the name of a preset."""
    check_module(net)
    net, reducer = join_ranks(net)
    if not isinstance(recipe, Recipe):
        raise InputTypeError(f"recipe must be an hgnp.Recipe, such as Recipe(keep=0.1), got {type(recipe).__name__}")
    check_functions(
        loss=loss,
        metric=None if isinstance(metric, Accumulator) and not isinstance(metric, type) else metric,
        unpack=unpack,
        output=output,
        on_step=on_step,
        on_epoch=on_epoch,
    )
    for name, given in (("optimizer", optimizer), ("scheduler", scheduler)):
        if given is not None and not callable(given) and not hasattr(given, "step"):
            raise InputError(f"{name} must be a torch {name} or a function that returns one, got {given!r}")
        if given is not None and (isinstance(given, type) or not hasattr(given, "step")):
            check_takes_one(name, given, "the parameters" if name == "optimizer" else "the optimizer")
    for name, callback in (("on_step", on_step), ("on_epoch", on_epoch)):
        if callback is not None:
            check_takes_one(name, callback, "the state")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise InputError(
            f"accumulate must be an integer ≥ 1, the batches per step of the optimizer, got {accumulate!r}"
        )
    check_flags(resume=resume)
    check_gradients()
    device = own_device(net, device)
    if next(net.parameters(), None) is None:
        raise InputError("net must have parameters, got a network without any")
    check_net(net)
    check_values(net)
    also = check_copies(net, also)
    if resume and out is None:
        raise InputError("out must be the folder of the run with resume=True, got None")
    recipe = recipe.resolved(scheduler=scheduler is not None)
    with failures_announced(reducer), contextlib.ExitStack() as stack:
        folder = RunFolder(out) if out is not None and reducer.rank == 0 else None  # rank 0 reads and writes for all

        def read() -> dict[str, Any]:
            if folder is None:
                return {"checkpoint": None}
            stack.enter_context(folder.locked(resume=resume))
            if folder.info.exists():
                folder.check_recipe(recipe)
            if folder.finished:
                return {"finished": read_finished(folder, len(also))}
            return {"checkpoint": checkpoint.read(folder.checkpoint) if folder.checkpoint.exists() else None}

        contents = checkpoint.from_rank_zero(reducer, read)
        assert contents is not None
        if "finished" in contents:
            return load_finished(contents["finished"], net, also, recipe, folder)
        stored = contents["checkpoint"]
        original_device = next(net.parameters()).device
        loop = None
        with rng_state.restored_on_error(train, val):
            try:
                if recipe.seed is not None:
                    rng_state.seed(recipe.seed)
                if device is not None:
                    _move((net, *also), optimizer, device)
                place = next(net.parameters()).device
                loader_batches = reducer.ranks if stored is None else stored["setup"].get("batches per global batch", 1)
                batches = Batches(train, "train", unpack, place, reducer, loader_batches)
                val_batches = None if val is None else Batches(val, "val", unpack, place, reducer, loader_batches)
                if reducer.rank:
                    progress = SilentProgress()
                task = Task(batches, val_batches, loss, metric, output, accumulate, reducer=reducer)
                loop = TrainingLoop(net, task, recipe, folder, progress, dict(about or {}))
                initial = None
                if recipe.snapshots:
                    initial = InitialCopy.create(net, recipe, optimizer, scheduler, validated=val is not None)
                loop.prepare(stored, optimizer, scheduler, protect, also)
            except BaseException:
                if loop is not None:
                    loop.undo_prepare()
                if device is not None:
                    _move((net, *also), optimizer, original_device)
                raise
        try:
            with preserve_modes(net):
                loop.train(on_step, on_epoch)
                return loop.finish(() if initial is None else finetune_snapshots(loop, initial))
        finally:
            loop.progress.stop()


def _move(networks: Iterable[nn.Module], optimizer: object, device: str | torch.device) -> None:
    for network in networks:
        network.to(device)
    if isinstance(optimizer, torch.optim.Optimizer) and any(
        isinstance(value, Tensor) and value.dim() and value.device != parameter.device
        for parameter, state in optimizer.state.items()
        for value in state.values()
    ):
        optimizer.load_state_dict(optimizer.state_dict())  # PyTorch loads it to where the parameters are


def _default_progress(*, verbose: bool) -> Progress:
    if not verbose:
        return SilentProgress()
    return BarProgress() if sys.stderr.isatty() else LineProgress(sys.stderr)


def read_finished(folder: RunFolder, copies: int) -> dict[str, Any]:
    """What a finished run left: its result, its history and its networks."""
    if folder.checkpoint.exists():
        history = read_history(checkpoint.read(folder.checkpoint)["run"])
    else:  # a finished run's checkpoint may be deleted, as it is large
        history = [dict(row) for row in runs.read(folder.path).rows]
    files = [folder.also(place) for place in range(copies)]
    if not all(file.exists() for file in files) or folder.also(copies).exists():
        raise InputError(f"resume: also must have as many networks as when {folder.path} was run, got {copies}")
    networks = [
        dict(zip(("file", "widths", "tensors"), (str(file), *read_saved(file)), strict=True))
        for file in (folder.model, *files)
    ]
    return {"result": read_json(folder.result), "history": history, "networks": networks, "path": str(folder.path)}


def load_finished(
    finished: Mapping[str, Any], net: nn.Module, also: Sequence[nn.Module], recipe: Recipe, folder: RunFolder | None
) -> Result:
    """The result of a finished run, with its networks loaded into `net` and `also`."""
    stored, path = finished["result"], Path(finished["path"])
    try:
        result = Result(
            model=net, history=finished["history"], recipe=recipe, before=NetworkStats(**stored["before"]),
            after=NetworkStats(**stored["after"]), target=Target(**stored["target"]), metric=stored["metric"],
            latency=stored["latency"], seconds=stored["seconds"], parts=stored["parts"], stopped=stored["stopped"],
            out=None if folder is None else path,
            snapshots=tuple(Snapshot(**each | {"path": path / each["path"]}) for each in stored.get("snapshots", ())),
        )  # fmt: skip
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{path / 'result.json'} must be a run's result, got another ({error}); delete it, and resume writes it again"
        ) from None
    changes: list[Change] = []
    for network, saved in zip((net, *also), finished["networks"], strict=True):
        try:
            changes += changes_to_fit(saved["widths"], saved["tensors"], network)
        except ValueError as error:
            raise InputError(f"{saved['file']}: {error}") from None
    commit(changes)
    for network in (net, *also):
        update_config(network)
    return result


def own_device(net: nn.Module, device: str | torch.device | None) -> torch.device | None:
    """The device to move to, None for none. Each of several ranks has its own GPU."""
    if device is None and created_group() and any(p.is_cuda for p in net.parameters()):
        device = "cuda"
    return None if device is None else device_of_rank(as_device(device))


def as_device(device: str | torch.device) -> torch.device:
    """A device that exists and holds data; InputError for any other."""
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen).cpu()  # fails for meta, which has no data to copy
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InputError(f"device must be one that PyTorch can use here, got {device!s}: {first_line(error)}") from None
    return chosen
