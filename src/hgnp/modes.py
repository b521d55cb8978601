"""Modes of modules, left as found."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def as_found(*nets: nn.Module) -> Iterator[None]:
    """After the block every module is in the mode, training or evaluation, it was in before."""
    modes = {module: module.training for net in nets for module in net.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def evaluating(*nets: nn.Module) -> Iterator[None]:
    """Inside the block the networks are in evaluation mode."""
    with as_found(*nets):
        for net in nets:
            net.eval()
        yield
