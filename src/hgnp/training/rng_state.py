"""RNG state: captured at the end of an epoch, restored when a run is resumed.

It covers the generators of Python, NumPy and PyTorch, on the CPU and on every GPU; those of loaders and samplers; and the
`state_dict` of any loader, sampler or dataset that has one. DataLoader workers are seeded from these at the start of an
epoch, so restoring them reproduces order and augmentation.

A `state_dict` may hold a position within the epoch, from which the next iteration continues once it is loaded. So states are
captured and restored between epochs only, never while a loader is being iterated.
"""

import copy
import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from hgnp.errors import InputError
from hgnp.reducer import Reducer

MAX_WRAPPERS = 3  # around one another
MAX_PARTS = 100  # of a list of loaders; a longer one holds data


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def seed_ranks(reducer: Reducer, epoch: int) -> None:
    """Give every rank but the first its own random numbers for an epoch, so that dropout and augmentation differ. They
    follow from rank 0's generators, which are left alone: those are the ones that a checkpoint holds."""
    if reducer.ranks == 1:
        return
    numpys: Any = np.random.get_state()
    sha = hashlib.sha256(f"{epoch} {random.getstate()} {numpys[2:]}".encode())
    sha.update(numpys[1].tobytes() + torch.get_rng_state().numpy().tobytes())
    first = reducer.broadcast(sha.digest())
    if reducer.rank:
        seed(int.from_bytes(hashlib.sha256(first + str(reducer.rank).encode()).digest()[:4], "big"))


def capture(*loaders: Any) -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "generators": [holder.get_state() for holder in _generators(loaders)],
        "stateful": _states(loaders),
    }


def restore(state: dict[str, Any], *loaders: Any) -> None:
    generators, stateful = _generators(loaders), _stateful(loaders)
    if len(generators) != len(state["generators"]) or len(stateful) != len(state["stateful"]):
        raise InputError("train and val must have the generators and states of the resumed run's loaders, got others")
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    for holder, own in zip(generators, state["generators"], strict=True):
        holder.set_state(own)
    _load_states(loaders, state["stateful"])


@contextmanager
def preserved(*loaders: Any) -> Iterator[None]:
    """Restore the RNG state after the block, so that measurements do not change the training. `loaders`: those that the block
    iterates over; none may be in the middle of an epoch."""
    before = capture(*loaders)
    try:
        yield
    finally:
        restore(before, *loaders)


@contextmanager
def restored_on_error(*loaders: Any) -> Iterator[None]:
    """Restore the RNG state if the block raises, so that a run that is refused leaves it as it was."""
    before = capture(*loaders)
    try:
        yield
    except BaseException:
        restore(before, *loaders)
        raise


@contextmanager
def preserved_position(loader: Any) -> Iterator[None]:
    """Restore the loader's own `state_dict` after the block. Random number generators stay advanced."""
    before = _states((loader,))
    try:
        yield
    finally:
        _load_states((loader,), before)


def prepare_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of samplers, datasets and loaders that have it, and restart persistent workers, whose RNG state cannot
    be captured."""
    for part in _components((loader,)):
        if isinstance(part, DataLoader) and part.persistent_workers:
            part._iterator = None
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def _with_wrapped(loader: Any, depth: int = MAX_WRAPPERS) -> Iterator[Any]:
    """A loader, and the loaders and generators that it wraps: attributes of a class of the user's, also in lists and dicts."""
    yield loader
    if depth and not isinstance(loader, DataLoader | Dataset | Sequence | Tensor | nn.Module):
        for value in _attributes(loader):
            if isinstance(value, torch.Generator):
                yield value
            elif hasattr(type(value), "__iter__") and not isinstance(value, str | bytes | dict | list | tuple):
                yield from _with_wrapped(value, depth - 1)


def _attributes(loader: Any) -> Iterator[Any]:
    slots = (name for kind in type(loader).__mro__ for name in getattr(kind, "__slots__", ()) if isinstance(name, str))
    own = [*getattr(loader, "__dict__", {}).values(), *(getattr(loader, name, None) for name in slots)]
    for value in own:
        yield value
        if isinstance(value, dict | list | tuple) and len(value) <= MAX_PARTS:
            yield from value.values() if isinstance(value, dict) else value


def _components(loaders: tuple[Any, ...]) -> list[Any]:
    """Loaders, also wrapped ones, their samplers and their datasets, without duplicates."""
    components: dict[int, Any] = {}
    for loader in itertools.chain.from_iterable(map(_with_wrapped, loaders)):
        batch_sampler = getattr(loader, "batch_sampler", None)
        for part in (
            loader,
            getattr(loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
            getattr(loader, "dataset", None),
        ):
            if part is not None:
                components.setdefault(id(part), part)
    return list(components.values())


def _generators(loaders: tuple[Any, ...]) -> list[torch.Generator]:
    parts = _components(loaders)
    generators = [part if isinstance(part, torch.Generator) else getattr(part, "generator", None) for part in parts]
    return list({id(g): g for g in generators if isinstance(g, torch.Generator)}.values())


def _stateful(loaders: tuple[Any, ...]) -> list[Any]:
    return [
        part
        for part in _components(loaders)
        if hasattr(part, "state_dict") and hasattr(part, "load_state_dict") and not _holds_position_only(part)
    ]


def _holds_position_only(part: Any) -> bool:
    """Whether it is torchdata's StatefulDataLoader or StatefulDistributedSampler. Their state is only a position within an
    epoch: it is not needed between epochs, and loading that of a completed epoch draws seeds again, or skips an epoch."""
    ours = isinstance(part, DataLoader | DistributedSampler)
    return ours and any(kind.__module__.partition(".")[0] == "torchdata" for kind in type(part).__mro__)


def _states(loaders: tuple[Any, ...]) -> list[Any]:
    return [copy.deepcopy(holder.state_dict()) for holder in _stateful(loaders)]


def _load_states(loaders: tuple[Any, ...], states: list[Any]) -> None:
    for holder, own in zip(_stateful(loaders), states, strict=True):
        holder.load_state_dict(own)
