"""The optimizer and the scheduler of a run: the recipe's, or the user's own."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hgnp.errors import InputError, InputTypeError
from hgnp.recipe import Recipe

OptimizerOrMaker = torch.optim.Optimizer | Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def make_optimizer(net: nn.Module, recipe: Recipe, given: OptimizerOrMaker | None) -> torch.optim.Optimizer:
    if given is None:
        return begun(torch.optim.SGD(
            net.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay,
            nesterov=recipe.nesterov and recipe.momentum > 0, fused=all(p.is_cuda for p in net.parameters()) or None,
        ))  # fmt: skip
    made = given if isinstance(given, torch.optim.Optimizer) else given(net.parameters())
    if not isinstance(made, torch.optim.Optimizer):
        raise InputTypeError(f"optimizer: it made a {type(made).__name__}; an optimizer or its maker would do")
    if isinstance(made, torch.optim.LBFGS):
        raise InputError("optimizer: LBFGS evaluates the loss several times a step; SGD, AdamW and the like would do")
    mine = {id(p) for p in net.parameters()}
    if not all(id(p) in mine for group in made.param_groups for p in group["params"]):
        raise InputError(
            "optimizer must hold the network's parameters alone, got others; a maker uses those that it is given"
        )
    return made


def begun(optimizer: torch.optim.SGD) -> torch.optim.SGD:
    """Fused, with all momenta at zero: PyTorch's fused step cannot begin those of some parameters (unfrozen in the middle of a
    run, or met by some batches alone) once others have theirs. Without dampening the first step from zero is the same."""
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"] and not group["dampening"]:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def make_scheduler(optimizer: torch.optim.Optimizer, recipe: Recipe, given: Any, *, validated: bool) -> Any:
    if given is None:
        return None
    if recipe.schedule != "constant":
        raise InputError(f"scheduler: it was given beside schedule={recipe.schedule!r}; one of the two would do")
    made = given(optimizer) if isinstance(given, type) or not hasattr(given, "step") else given
    if not hasattr(made, "step"):
        raise InputTypeError(f"scheduler: it made a {type(made).__name__}; a scheduler or its maker would do")
    if getattr(made, "optimizer", optimizer) is not optimizer:
        raise InputError("scheduler: it is that of another optimizer; one of the optimizer that is given would do")
    if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau) and not validated:
        raise InputError("scheduler: ReduceLROnPlateau needs the loss on validation data, and val was not given")
    return made


def step_scheduler(scheduler: Any, val_loss: float | None) -> str | None:
    """After an epoch; one that waits for a plateau looks at the validation loss. A note if it is not stepped: it would take a
    loss that is NaN for a plateau."""
    plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    if plateau and (val_loss is None or math.isnan(val_loss)):
        return "scheduler: ReduceLROnPlateau is not stepped after epochs whose validation loss is not a number"
    try:
        if plateau:
            scheduler.step(val_loss)
        elif scheduler is not None:
            scheduler.step()
    except ValueError as error:  # OneCycleLR after its last step
        raise InputError(f"scheduler: it is stepped once an epoch, and refused: {error}") from error
    return None
