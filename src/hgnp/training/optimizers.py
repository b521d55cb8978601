"""Optimizer and scheduler of a run: the recipe's, or the user's own."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hgnp.errors import InputError, InputTypeError
from hgnp.recipe import Recipe, SchedulerInterval

OptimizerOrFactory = torch.optim.Optimizer | Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def make_optimizer(net: nn.Module, recipe: Recipe, given: OptimizerOrFactory | None) -> torch.optim.Optimizer:
    if given is None:
        return initialize_momentum(torch.optim.SGD(
            net.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay,
            nesterov=recipe.nesterov, fused=all(p.is_cuda for p in net.parameters()) or None,
        ))  # fmt: skip
    made = given if isinstance(given, torch.optim.Optimizer) else given(net.parameters())
    if not isinstance(made, torch.optim.Optimizer):
        raise InputTypeError(
            f"optimizer must be a torch optimizer or a function that returns one, got {type(made).__name__}"
        )
    if isinstance(made, torch.optim.LBFGS):
        raise InputError("optimizer must evaluate the loss once per step, as SGD and AdamW do, got LBFGS")
    if not all("lr" in group for group in made.param_groups):
        raise InputError(
            "optimizer must have its learning rate as 'lr' in every parameter group, which the schedule scales, got "
            f"{', '.join(repr(key) for key in made.param_groups[0] if key != 'params')}"
        )
    check_parameters(made, net, "a function must use those it is called with")
    return made


def check_parameters(optimizer: torch.optim.Optimizer, net: nn.Module, hint: str) -> None:
    """InputError, with `hint`, unless all parameters of the optimizer are the network's."""
    mine = {id(p) for p in net.parameters()}
    if not all(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
        raise InputError(f"optimizer must hold the network's parameters alone, got others; {hint}")


def initialize_momentum(optimizer: torch.optim.SGD) -> torch.optim.SGD:
    """Set the momenta of a fused SGD to zero. PyTorch's fused step cannot create the momenta of some parameters (unfrozen
    later, or used by some batches only) once others have theirs. Without dampening a first step from zero is the same."""
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"] and not group["dampening"]:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def make_scheduler(optimizer: torch.optim.Optimizer, recipe: Recipe, given: Any, *, validated: bool) -> Any:
    if given is None:
        return None
    if recipe.schedule != "constant":
        raise InputError(f"schedule must be None or 'constant' with a scheduler, got {recipe.schedule!r}")
    made = given(optimizer) if isinstance(given, type) or not hasattr(given, "step") else given
    if not hasattr(made, "step"):
        raise InputTypeError(
            f"scheduler must be a torch scheduler or a function that returns one, got {type(made).__name__}"
        )
    if getattr(made, "optimizer", optimizer) is not optimizer:
        raise InputError("scheduler must belong to the run's optimizer, got one of another optimizer")
    if needs_val_loss(made):
        if not validated:
            raise InputError("val must be set with ReduceLROnPlateau, which needs the validation loss, got None")
        if recipe.scheduler_interval == "step":
            raise InputError(
                "scheduler_interval must be 'epoch' with ReduceLROnPlateau, as there is one validation per epoch, got 'step'"
            )
    return made


def scheduler_interval(scheduler: Any, recipe: Recipe) -> SchedulerInterval:
    """When the scheduler is stepped: as the recipe says, or else as PyTorch documents its class."""
    by_step = isinstance(scheduler, torch.optim.lr_scheduler.OneCycleLR | torch.optim.lr_scheduler.CyclicLR)
    return recipe.scheduler_interval or ("step" if by_step else "epoch")


def needs_val_loss(scheduler: Any) -> bool:
    """Whether it is stepped with the validation loss."""
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)


def step_scheduler(scheduler: Any, val_loss: float | None) -> str | None:
    """Step the scheduler, ReduceLROnPlateau with the validation loss. Returns a note if that loss is missing or NaN: the
    scheduler is not stepped then, as it would count the epoch as a plateau. OneCycleLR stays at its last learning rate."""
    if needs_val_loss(scheduler):
        if val_loss is None or math.isnan(val_loss):
            return "scheduler: ReduceLROnPlateau is not stepped after epochs whose validation loss is not a number"
        scheduler.step(val_loss)
    elif not has_ended(scheduler):
        scheduler.step()
    return None


def has_ended(scheduler: Any) -> bool:
    """Whether the scheduler is a OneCycleLR at the last of its `total_steps` learning rates. Two steps more would be an error,
    and the next one leads beyond the cycle."""
    return (
        isinstance(scheduler, torch.optim.lr_scheduler.OneCycleLR) and scheduler.last_epoch >= scheduler.total_steps - 1
    )
