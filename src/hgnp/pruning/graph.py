"""A recorded forward: tensors and the operators between them, without data."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from hgnp.pruning.module_calls import Frame

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Kind(NamedTuple):
    """What is known of a parameter or buffer beside its shape."""

    dtype: torch.dtype
    device: torch.device
    order: tuple[int, ...]
    """The dimensions in the order in which they lie in memory."""
    counter: int | None
    """The value of a counter, which code may read."""


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
    """The data of a tensor that the code wrote down itself or found lying about."""


@dataclass(frozen=True)
class Step:
    """One operator call. Tensors in `args` and `kwargs` are `Ref`s."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    module: str


@dataclass(frozen=True)
class Invocation:
    """One call of a torch function by the network's own code. Tensors are named by their place among the leaves of the
    arguments or results."""

    name: str
    frame: Frame
    """The module's call that made it."""
    tensors: dict[int, int | None]
    """The tensors it was given: place → value."""
    results: dict[int, int | None]
    steps: range
    """What it came to."""
    numbers: tuple["Number", ...]
    """What else it was given."""


class Number(NamedTuple):
    """An argument that is no tensor: a size, a dimension, an index."""

    dim: int | None
    """The dimension that it is an index into, where that can be told."""
    value: Any


@dataclass
class Graph:
    values: list[Value] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    invocations: list[Invocation] = field(default_factory=list)
    outputs: tuple[int, ...] = ()
    calls: list[tuple[str, int]] = field(default_factory=list)
    """(module name, its first tensor input) for each module call, in order."""
    error: Exception | None = None
    """What stopped the forward, if anything did; `steps` then end where it happened."""
    where: str = ""
    """The module in which it happened."""


def function_name(func: Callable[..., Any]) -> str:
    """The name of a torch function, or of the attribute that is read (`x.T`)."""
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", "") if name == "__get__" and hasattr(func, "__self__") else name


def is_invocation(name: str, result: Any) -> bool:
    """Whether a torch function has made or changed a tensor. Others only ask for something (`x.size()`, `x.device`), which fake
    tensors answer in part without a call."""
    return name == "__setitem__" or any(isinstance(leaf, Tensor) for leaf in tree_leaves(result))


def numbers_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Number, ...]:
    """What a call was given that can decide where its channels go."""
    if name == "__getitem__" and args[1:] and not isinstance(args[1], list):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return tuple(_indices(index, args[0].dim()))
    leaves = tree_leaves((args, kwargs))
    return tuple(
        Number(None, leaf) for leaf in leaves if leaf is None or isinstance(leaf, int | str | slice | torch.Size)
    )


def _indices(index: tuple[Any, ...], ndim: int) -> Iterator[Number]:
    """The parts of x[index] with the dimensions that they are for."""
    taken = [part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1 for part in index]
    taken = [
        0 if part is None or part is ... or isinstance(part, bool) else n for part, n in zip(index, taken, strict=True)
    ]
    dim = 0
    for part, n in zip(index, taken, strict=True):
        if part is ...:
            dim = ndim - sum(taken) + dim
        elif isinstance(part, int | slice) and not isinstance(part, bool):
            yield Number(dim, part)
        elif not isinstance(part, Tensor):
            yield Number(None, str(part))  # a new dimension, or a list
        dim += n


def kind_of(tensor: Tensor) -> Kind:
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    counts = tensor.dim() == 0 and tensor.dtype == torch.long and tensor.device.type == "cpu"
    return Kind(
        tensor.dtype,
        tensor.device,
        tuple(range(tensor.dim())) if tensor.is_contiguous() else tuple(order),
        int(tensor) if counts else None,
    )


def tensors_of(net: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by its first name, shared ones once, buffers that are not saved included."""
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}
