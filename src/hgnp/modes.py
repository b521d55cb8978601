"""Evaluation mode for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(*nets: nn.Module) -> Iterator[None]:
    """Inside the block the networks are in evaluation mode; afterwards every module is in the mode it was in."""
    modes = {module: module.training for net in nets for module in net.modules()}
    for net in nets:
        net.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
