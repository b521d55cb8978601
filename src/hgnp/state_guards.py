"""State guards: context managers that restore modes, module attributes and random number generators."""

import gc
import random
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd


class _EagerStance:
    """PyTorch's stance on compiled functions is one for all threads: the first that enters sets it, the last that leaves
    restores it. Otherwise a thread that leaves second would restore what the first had set."""

    def __init__(self) -> None:
        self._lock, self._inside, self._restore = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside and "torch._dynamo" in sys.modules:  # which torch.compile imports
                self._restore.enter_context(torch.compiler.set_stance("force_eager"))
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._restore.close()


compiled_functions_run_eagerly = _EagerStance()
"""Inside the block functions of torch.compile run as they are written, so that their operations can be seen."""


@contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Inside the block Python's cyclic garbage collector does not run."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def preserve_modes(*nets: nn.Module) -> Iterator[None]:
    """After the block every module is back in its mode, training or evaluation."""
    modes = {module: module.training for net in nets for module in net.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def evaluating(*nets: nn.Module, loss_needs_training_mode: bool = False) -> Iterator[None]:
    """Inside the block the networks are in evaluation mode. With `loss_needs_training_mode`, for networks that return their
    losses in training mode only, norms and dropout alone are (`norms_and_dropout_to_eval`): the other modules are in training
    mode. What these still draw, as `F.dropout(x, training=self.training)` and samplers of boxes do, comes from a fixed seed:
    passes repeat it."""
    with preserve_modes(*nets), ExitStack() as generators:
        for net in nets:
            net.train(loss_needs_training_mode)
            norms_and_dropout_to_eval(net)
            if loss_needs_training_mode:
                generators.enter_context(preserve_generators(net))
                _seed_generators(net)
        yield


def norms_and_dropout_to_eval(net: nn.Module) -> None:
    """Also attention and recurrent layers, which have their own dropout, and stochastic depth (`StochasticDepth`, `DropPath`,
    `DropBlock`), which PyTorch has no class for: by its name."""
    for module in net.modules():
        drops = any(word in type(module).__name__ for word in ("Drop", "StochasticDepth")) and not module._modules
        if drops or isinstance(module, _NormBase | _DropoutNd | nn.MultiheadAttention | nn.RNNBase):
            module.training = False


def _seed_generators(net: nn.Module) -> None:
    """Those that `preserve_generators` restores."""
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    for device in {p.device for p in net.parameters() if p.device.type == "cuda"}:
        torch.cuda.default_generators[device.index].manual_seed(0)


@contextmanager
def preserve_generators(net: nn.Module) -> Iterator[None]:
    """After the block the generators of Python, NumPy and PyTorch, on the CPU and the network's devices, are as before."""
    generators = random.getstate(), np.random.get_state()
    devices = {p.device for p in net.parameters() if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=sorted(devices, key=str)):
            yield
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])


@contextmanager
def preserve_state(net: nn.Module) -> Iterator[None]:
    """After the block the modules' attributes and all random number generators are as before."""
    modules = list(net.modules())
    attributes = [dict(module.__dict__) for module in modules]
    for module in modules:  # the block works on copies of the network's own caches and lists
        copied = {key: _copy_containers(value) for key, value in module.__dict__.items() if type(value) in _COPIED}
        module.__dict__.update(copied)
    try:
        with preserve_generators(net):
            yield
    finally:
        for module, before in zip(modules, attributes, strict=True):
            module.__dict__.clear()
            module.__dict__.update(before)


_COPIED = frozenset({dict, OrderedDict, list, set, deque})


def _copy_containers(value: Any) -> Any:
    """Copies plain containers, including nested ones; returns everything else unchanged."""
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _copy_containers(part)) for key, part in value.items())
    if type(value) in (list, set, deque):
        return type(value)(_copy_containers(part) if type(value) is list else part for part in value)
    return value


def python_rng_state() -> tuple[Any, ...]:
    """The state of Python's and NumPy's random number generators, comparable with ==."""
    state = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2]  # type: ignore[index]


def module_that_raised(net: nn.Module, error: BaseException) -> str:
    """The name of the innermost module of the network in which the error was raised."""
    names = {id(module): name for name, module in net.named_modules()}
    innermost = ""
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        innermost = names.get(id(owner), innermost) if isinstance(owner, nn.Module) else innermost
        trace = trace.tb_next
    return innermost
