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


def layer_of(net: nn.Module, error: BaseException) -> str:
    """The innermost layer of the network that an error was raised in, by name."""
    names = {id(module): name for name, module in net.named_modules()}
    found = ""
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        found = names.get(id(owner), found) if isinstance(owner, nn.Module) else found
        trace = trace.tb_next
    return found
