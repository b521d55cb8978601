"""What a forward that computes nothing must not change: the modules' attributes and the random streams."""

import random
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


@contextmanager
def left_as_found(net: nn.Module) -> Iterator[None]:
    """Undo whatever the block does to the modules' attributes and to the random streams."""
    modules = list(net.modules())
    found = [dict(module.__dict__) for module in modules]
    streams = random.getstate(), np.random.get_state()
    devices = {p.device for p in net.parameters() if p.device.type == "cuda"}
    for module in modules:  # caches and lists of the network's own are worked on as copies
        module.__dict__.update({key: _copy(value) for key, value in module.__dict__.items()})
    try:
        with torch.random.fork_rng(devices=sorted(devices, key=str)):
            yield
    finally:
        random.setstate(streams[0])
        np.random.set_state(streams[1])
        for module, attributes in zip(modules, found, strict=True):
            module.__dict__.clear()
            module.__dict__.update(attributes)


def _copy(value: Any) -> Any:
    """Plain containers copied, with the containers in them; everything else as it is."""
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _copy(part)) for key, part in value.items())
    if type(value) in (list, set, deque):
        return type(value)(_copy(part) if type(value) is list else part for part in value)
    return value


def chance() -> tuple[Any, ...]:
    """Where Python's and NumPy's random streams stand."""
    state = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2]  # type: ignore[index]
