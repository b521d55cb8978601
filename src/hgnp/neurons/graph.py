"""What a network really does, operator by operator, recorded without computing anything.

The network's own forward runs once on fake tensors (shapes without data) while a dispatch mode writes down every ATen
operator. Python code, hooks and parametrisations take part as they would in training; weights, buffers, random state and
the modules' attributes are left as found.
"""

import logging
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

Kind = tuple[torch.dtype, torch.device, tuple[int, ...]]
"""Dtype, device, and the dimensions in the order in which they lie in memory."""
UNSEEN = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


@dataclass(frozen=True)
class Ref:
    """Stands for a tensor inside a step's arguments: the index of its `Value`."""

    index: int


@dataclass(frozen=True)
class Value:
    """One tensor of the recorded forward."""

    shape: tuple[int, ...]
    repeated: tuple[bool, ...]
    """Dimensions along which the tensor is one entry repeated (stride 0)."""
    storage: int
    name: str | None
    """The parameter or buffer it is, if it is one."""
    made: bool
    """Made by a step; False for weights, inputs and tensors found lying about."""
    constant: Tensor | None
    """The data of a small tensor that the code wrote down itself."""


@dataclass(frozen=True)
class Step:
    """One operator call. Tensors in `args` and `kwargs` are `Ref`s."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    module: str


@dataclass
class Graph:
    values: list[Value] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    outputs: tuple[int, ...] = ()
    calls: list[tuple[str, int]] = field(default_factory=list)
    """(module name, its first tensor input) for each module call, in order."""
    error: Exception | None = None
    """What stopped the forward, if anything did; `steps` then end where it happened."""
    where: str = ""
    """The module in which it happened."""


class _Recorder(TorchDispatchMode):
    def __init__(self, weights: Mapping[int, str], inputs: list[Tensor]) -> None:
        super().__init__()
        self.graph = Graph()
        self.stack: list[str] = []
        self._weights = weights
        self._index: dict[int, int] = {}
        self._alive: list[Tensor] = []  # keeps id() unique for the length of the recording
        for tensor in inputs:
            self.value(tensor, made=False)

    def value(self, tensor: Tensor, *, made: bool) -> int:
        index = self._index.get(id(tensor))
        if index is None or self.graph.values[index].shape != tensor.shape:  # some operators reshape in place
            index = self._index[id(tensor)] = len(self.graph.values)
            self._alive.append(tensor)
            shape = tuple(int(n) for n in tensor.shape)
            strided = tensor.layout == torch.strided
            self.graph.values.append(
                Value(
                    shape=shape,
                    repeated=tuple(n > 1 and s == 0 for n, s in zip(shape, tensor.stride(), strict=True))
                    if strided
                    else (False,) * len(shape),
                    storage=tensor.untyped_storage()._cdata if strided else -1 - index,
                    name=self._weights.get(id(tensor)),
                    made=made,
                    constant=tensor.constant if isinstance(tensor, FakeTensor) else None,
                )
            )
        return index

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves, _ = tree_flatten((args, kwargs))
        reads = tuple(self.value(leaf, made=False) for leaf in leaves if isinstance(leaf, Tensor))
        result = _batch_norm(*args) if op is torch.ops.aten.native_batch_norm.default else op(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if made:
            refs = tree_map(
                lambda leaf: Ref(self._index[id(leaf)]) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
            )
            writes = tuple(self.value(tensor, made=True) for tensor in made)
            module = self.stack[-1] if self.stack else ""
            self.graph.steps.append(Step(op, refs[0], refs[1], reads, writes, module))
        return result


def _batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any
) -> tuple[Tensor, ...]:
    """The shapes of a batch norm. Fake tensors get them from twenty smaller operators, most of the time of a recording."""
    channels = x.shape[1]
    for entry in (weight, bias, mean, var):
        if entry is not None and entry.shape[0] != channels:
            raise RuntimeError(f"a batch norm of {entry.shape[0]} channels is given {channels}")
    return torch.empty_like(x), *(x.new_empty(channels if training else 0) for _ in range(2))


def record(
    net: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    *,
    training: bool,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    kinds: Mapping[str, Kind] | None = None,
    adjust: Callable[[], None] = lambda: None,
) -> Graph:
    """The forward of `net` in train or eval mode as a graph.

    `shapes` and `kinds` give parameters and buffers another shape, dtype and device for this one forward and `adjust` sets
    module attributes to match: that is how a removal is tried before anything is touched.
    """
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes, weights = _fake_weights(net, fake_mode, shapes or {}, kinds or {})
    args, kwargs = tree_map(lambda leaf: fake_mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, inputs)
    recorder = _Recorder(weights, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
    names = {id(module): name for name, module in net.named_modules()}

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        name = names.get(id(module), recorder.stack[-1] if recorder.stack else "")
        recorder.stack.append(name)
        if args and isinstance(args[0], Tensor):
            recorder.graph.calls.append((name, recorder.value(args[0], made=False)))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        recorder.stack.pop()

    with _left_as_found(net):
        net.train(training)
        adjust()
        for module in net.modules():
            for own in (module.__dict__["_parameters"], module.__dict__["_buffers"]):
                own.update({key: fakes[id(tensor)] for key, tensor in own.items() if tensor is not None})
        hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        log = logging.getLogger(FakeTensorMode.__module__)  # it reports every shape that does not fit; so do we
        level = log.level
        log.setLevel(logging.CRITICAL)
        fast_attention = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with (
                warnings.catch_warnings(action="ignore"),
                torch.enable_grad(),
                sdpa_kernel(SDPBackend.MATH),
                fake_mode,
                recorder,
            ):
                output = net(*args, **kwargs)
            recorder.graph.outputs = tuple(recorder.value(t, made=False) for t in _tensors(output))
        except Exception as error:
            recorder.graph.error, recorder.graph.where = error, recorder.stack[-1] if recorder.stack else ""
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_attention)
            log.setLevel(level)
            for hook in hooks:
                hook.remove()
    return recorder.graph


def quiet_norms(net: nn.Module) -> None:
    """Put batch norms in eval mode: one value a channel cannot be normalised over the batch."""
    for module in net.modules():
        if isinstance(module, _BatchNorm):
            module.training = False


def kind_of(tensor: Tensor) -> Kind:
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    return tensor.dtype, tensor.device, tuple(range(tensor.dim())) if tensor.is_contiguous() else tuple(order)


def tensors_of(net: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by its first name, shared ones once, buffers that are not saved included."""
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def _fake_weights(
    net: nn.Module, fake_mode: FakeTensorMode, shapes: Mapping[str, tuple[int, ...]], kinds: Mapping[str, Kind]
) -> tuple[dict[int, Tensor], dict[int, str]]:
    """Fake counterparts by the id of the real tensor, and names by the id of the fake one."""
    fakes: dict[int, Tensor] = {}
    weights: dict[int, str] = {}
    for name, tensor in tensors_of(net).items():
        kind = kinds.get(name) or kind_of(tensor)
        shape = shapes.get(name, tuple(tensor.shape))
        if kind == kind_of(tensor) and shape == tensor.shape:
            fake: Tensor = fake_mode.from_tensor(tensor)
        else:
            dtype, device, order = kind
            with fake_mode:
                fake = torch.empty([shape[dim] for dim in order], dtype=dtype, device=device)
                fake = fake.permute([order.index(dim) for dim in range(len(order))])
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, tensor.requires_grad)
        fakes[id(tensor)] = fake
        weights[id(fake)] = name
    return fakes, weights


def _tensors(output: Any, depth: int = 4) -> Iterator[Tensor]:
    """The tensors in whatever a network returns, plain objects with tensors as attributes included."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module):
            yield from _tensors(dict(vars(leaf)), depth - 1)


@contextmanager
def _left_as_found(net: nn.Module) -> Iterator[None]:
    """Undo whatever the block does to the modules' attributes and to the random streams."""
    modules = list(net.modules())
    found = [dict(module.__dict__) for module in modules]
    streams = random.getstate(), np.random.get_state()
    devices = {p.device for p in net.parameters() if p.device.type == "cuda"}
    for module in modules:
        for key in ("_parameters", "_buffers", "_modules"):
            module.__dict__[key] = dict(module.__dict__[key])
    try:
        with torch.random.fork_rng(devices=sorted(devices, key=str)):
            yield
    finally:
        random.setstate(streams[0])
        np.random.set_state(streams[1])
        for module, attributes in zip(modules, found, strict=True):
            module.__dict__.clear()
            module.__dict__.update(attributes)
