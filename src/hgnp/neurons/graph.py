"""A recorded forward: tensors and the operators between them, without data."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

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
    """One call of a torch function by the network's own code: the tensors it was given, those it returned and the steps it
    came to. Reading an
    attribute (`x.device`) is none: fake tensors answer some of that without a call."""

    name: str
    tensors: tuple[int | None, ...]
    results: tuple[int | None, ...]
    steps: range


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


def is_invocation(func: Callable[..., Any]) -> bool:
    return getattr(func, "__name__", "") != "__get__"


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
