"""Every random stream that a run draws from: taken at the end of an epoch, and put back.

Python's, NumPy's and PyTorch's own, on the CPU and on every GPU; the generators of the loaders and their samplers; and
whatever loader, sampler or data set keeps a `state_dict`. Workers of a DataLoader are seeded from these at the start of an
epoch, so that restoring them brings back order and augmentation.

A `state_dict` may hold a position within the epoch, from which the next iteration goes on once it is loaded. So states are
taken and loaded between epochs only, never of a loader that is being iterated.
"""

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler

from hgnp.errors import InputError


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def take(*loaders: Any) -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "generators": [holder.get_state() for holder in _generators(loaders)],
        "stateful": _states(loaders),
    }


def put_back(state: dict[str, Any], *loaders: Any) -> None:
    generators, stateful = _generators(loaders), _stateful(loaders)
    if len(generators) != len(state["generators"]) or len(stateful) != len(state["stateful"]):
        raise InputError("train or val: the loaders are others than those of the run that is resumed")
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    for holder, own in zip(generators, state["generators"], strict=True):
        holder.set_state(own)
    _load(loaders, state["stateful"])


@contextmanager
def untouched(*loaders: Any) -> Iterator[None]:
    """What is measured inside the block does not change what is trained after it. `loaders`: those that are iterated inside the
    block; none of them may be in the middle of an epoch."""
    before = take(*loaders)
    try:
        yield
    finally:
        put_back(before, *loaders)


@contextmanager
def rewound(loader: Any) -> Iterator[None]:
    """After the block a loader with a state of its own is where it was. Random streams go on."""
    before = _states((loader,))
    try:
        yield
    finally:
        _load((loader,), before)


def begin_epoch(loader: Any, epoch: int) -> None:
    """Tells a distributed sampler the epoch, and gives it new workers: those that live through several epochs keep streams
    of their own, which cannot be taken."""
    if getattr(loader, "persistent_workers", False):
        loader._iterator = None
    set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)


def _parts(loaders: tuple[Any, ...]) -> list[Any]:
    """Loaders, their samplers and data sets, each once."""
    found: dict[int, Any] = {}
    for loader in loaders:
        batch_sampler = getattr(loader, "batch_sampler", None)
        for part in (
            loader,
            getattr(loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
            getattr(loader, "dataset", None),
        ):
            if part is not None:
                found.setdefault(id(part), part)
    return list(found.values())


def _generators(loaders: tuple[Any, ...]) -> list[torch.Generator]:
    found = [getattr(part, "generator", None) for part in _parts(loaders)]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def _stateful(loaders: tuple[Any, ...]) -> list[Any]:
    return [
        part
        for part in _parts(loaders)
        if hasattr(part, "state_dict") and hasattr(part, "load_state_dict") and not _positional(part)
    ]


def _positional(part: Any) -> bool:
    """Whether it is torchdata's StatefulDataLoader or StatefulDistributedSampler. Their state is a position within an epoch and
    nothing else: none is needed between epochs, and loading that of a finished one draws seeds again, or skips an epoch."""
    ours = isinstance(part, DataLoader | DistributedSampler)
    return ours and any(kind.__module__.partition(".")[0] == "torchdata" for kind in type(part).__mro__)


def _states(loaders: tuple[Any, ...]) -> list[Any]:
    return [copy.deepcopy(holder.state_dict()) for holder in _stateful(loaders)]


def _load(loaders: tuple[Any, ...], states: list[Any]) -> None:
    for holder, own in zip(_stateful(loaders), states, strict=True):
        holder.load_state_dict(own)
