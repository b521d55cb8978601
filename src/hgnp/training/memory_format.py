"""The memory format of convolution weights during a run: unchanged, or channels last.

It changes the speed of a step and the last digits of its results. So that a repeated run is the same, "auto" follows a fixed
rule, and the checkpoint stores the choice. The number of threads is not changed, and `torch.compile` is not used;
benchmarks/cpu.md has the measurements.
"""

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hgnp.curvature.autodiff.forward import run
from hgnp.errors import first_line
from hgnp.recipe import Recipe
from hgnp.state_guards import evaluating
from hgnp.training.task import Task
from hgnp.training.trainer import EpochStatistics, Trainer, make_steps

MemoryFormat = Literal["channels_last"] | None
"""None: unchanged."""
CHANNELS_LAST: MemoryFormat = "channels_last"
MIN_CHANNELS = 256  # narrower networks gain less than a tenth on a CPU
CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


def choose_memory_format(
    net: nn.Module, task: Task, recipe: Recipe, batch: tuple[Any, Any]
) -> tuple[MemoryFormat, str | None]:
    """The memory format of a new run, None for unchanged, and a note if channels last was tried and failed.

    Channels last is chosen for wide networks, on a GPU for all, if a step of a copy succeeds: a `view` of an image's rows
    fails. `net` is not changed.
    """
    channels = MIN_CHANNELS if task.train.device.type == "cpu" else 1
    if recipe.execution == "eager" or all(module.out_channels < channels for _, module in _convolutions(net)):
        return None, None
    try:
        _try_channels_last(net, task, recipe, batch)
    except Exception as error:  # the user's code may raise anything
        return None, f"the memory format is unchanged, as a step with channels last failed: {first_line(error)}"
    return CHANNELS_LAST, None


def contiguous_layers(net: nn.Module) -> list[str]:
    """The 2-d convolutions whose weights are contiguous."""
    return [name for name, module in _convolutions(net) if module.weight.is_contiguous()]


@contextmanager
def in_memory_format(
    net: nn.Module, optimizer: torch.optim.Optimizer, memory_format: MemoryFormat, contiguous: Collection[str]
) -> Iterator[None]:
    """Inside the block, weights of 2-d convolutions have this memory format, and activations follow. Afterwards the weights of
    the layers named in `contiguous` are contiguous again."""
    try:
        if memory_format == CHANNELS_LAST:
            _to_channels_last(net)
        _match_layout(optimizer)
        yield
    finally:
        for name in contiguous if memory_format == CHANNELS_LAST else ():
            weight = net.get_submodule(name).weight
            assert isinstance(weight, Tensor)
            weight.data = weight.data.contiguous()
        _match_layout(optimizer)


def _convolutions(net: nn.Module) -> Iterator[tuple[str, nn.Conv2d | nn.ConvTranspose2d]]:
    return ((name, module) for name, module in net.named_modules() if isinstance(module, CONVOLUTIONS))


def _to_channels_last(net: nn.Module) -> None:
    for _, module in _convolutions(net):
        module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)


def _match_layout(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer's state the strides of its parameters. Fused optimizers assume equal strides and are silently wrong
    otherwise; a checkpoint stores contiguous tensors."""
    for parameter, state in optimizer.state.items():
        for name, kept in state.items():
            if isinstance(kept, Tensor) and kept.shape == parameter.shape and kept.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=kept.dtype).copy_(kept)


def _try_channels_last(net: nn.Module, task: Task, recipe: Recipe, batch: tuple[Any, Any]) -> None:
    """Run an evaluation and a training step on a copy of `net`."""
    trial = copy.deepcopy(net)
    _to_channels_last(trial)
    with evaluating(trial, loss_needs_training_mode=task.loss_needs_training_mode), torch.no_grad():
        run(trial, batch[0], output=task.output)
    optimizer = torch.optim.SGD(trial.parameters(), lr=0.0, momentum=recipe.momentum)
    step, _, state = make_steps(trial, task, recipe)
    trainer = Trainer(step, state, optimizer, recipe, task.train.device)
    trial.train()
    trainer.backward(batch, EpochStatistics())
    trainer.optimizer_step()
