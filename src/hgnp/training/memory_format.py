"""The memory format that steps run in: as found, or channels last.

It changes how fast a step is, and its last digits. So that a run is the same when it is repeated, "auto" goes by a fixed
rule, and the checkpoint says what was chosen. Threads stay as found, and `torch.compile` is not used: benchmarks/cpu.md has
what both cost and save.
"""

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hgnp.curvature.autodiff.forward import run
from hgnp.errors import first_line
from hgnp.recipe import Recipe
from hgnp.state_guards import evaluating
from hgnp.training.task import Task
from hgnp.training.trainer import EpochStatistics, Trainer, make_steps

CHANNELS_LAST = "channels_last"
WIDE = 256  # channels; narrower networks gain less than a tenth on a CPU
LAID_OUT = (nn.Conv2d, nn.ConvTranspose2d)


def choose(net: nn.Module, task: Task, recipe: Recipe, batch: tuple[Any, Any]) -> tuple[str | None, str | None]:
    """The memory format of a run that begins, None for as found, and a note where the rule could not be followed.

    Channels last for a network that is wide, or on a GPU, and whose code takes it: a `view` of a picture's rows does not. `net`
    stays as it is.
    """
    wide = WIDE if task.train.device.type == "cpu" else 1
    if recipe.execution == "eager" or all(module.out_channels < wide for _, module in _convolutions(net)):
        return None, None
    try:
        _try_channels_last(net, task, recipe, batch)
    except Exception as error:  # the user's code may raise anything
        return None, f"steps run as found, as a step with channels last failed: {first_line(error)}"
    return CHANNELS_LAST, None


def contiguous_layers(net: nn.Module) -> list[str]:
    """The 2-d convolutions whose weights are contiguous."""
    return [name for name, module in _convolutions(net) if module.weight.is_contiguous()]


@contextmanager
def in_memory_format(
    net: nn.Module, optimizer: torch.optim.Optimizer, memory_format: str | None, contiguous: Collection[str]
) -> Iterator[None]:
    """Inside the block, weights of 2-d convolutions have this memory format, which all that is computed from them takes on.
    Afterwards those of the layers named in `contiguous` are contiguous again."""
    try:
        if memory_format == CHANNELS_LAST:
            _to_channels_last(net)
        _follow(optimizer)
        yield
    finally:
        for name in contiguous if memory_format == CHANNELS_LAST else ():
            weight = net.get_submodule(name).weight
            assert isinstance(weight, Tensor)
            weight.data = weight.data.contiguous()
        _follow(optimizer)


def _convolutions(net: nn.Module) -> Iterator[tuple[str, nn.Conv2d | nn.ConvTranspose2d]]:
    return ((name, module) for name, module in net.named_modules() if isinstance(module, LAID_OUT))


def _to_channels_last(net: nn.Module) -> None:
    for _, module in _convolutions(net):
        module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)


def _follow(optimizer: torch.optim.Optimizer) -> None:
    """Lays out what an optimizer keeps of each parameter as the parameter is: fused ones go through both as if they were, and
    are silently wrong otherwise. A checkpoint holds all of it contiguous."""
    for parameter, state in optimizer.state.items():
        for name, kept in state.items():
            if isinstance(kept, Tensor) and kept.shape == parameter.shape and kept.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=kept.dtype).copy_(kept)


def _try_channels_last(net: nn.Module, task: Task, recipe: Recipe, batch: tuple[Any, Any]) -> None:
    """An evaluation and a training step of a copy of `net`."""
    mine = copy.deepcopy(net)
    _to_channels_last(mine)
    with evaluating(mine), torch.no_grad():
        run(mine, batch[0], output=task.output)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.0, momentum=recipe.momentum)
    step, _, state = make_steps(mine, task, recipe)
    epochs = Trainer(step, state, optimizer, recipe, task.train.device)
    mine.train()
    epochs.step(batch, EpochStatistics())
