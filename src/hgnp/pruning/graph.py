"""A traced forward pass: tensors and the operator calls between them, without data."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from hgnp.pruning.module_calls import ModuleCall

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a network."""


class Outputs(NamedTuple):
    """Which tensors count as a network's outputs."""

    function: Callable[..., Any]
    replaces_forward: bool
    """False: a function of what the network returns."""
    is_method: bool
    """A method of one of the network's modules, which takes the inputs alone; another function takes the network first."""


class TensorSpec(NamedTuple):
    """Metadata of a parameter or buffer beside its shape."""

    dtype: torch.dtype
    device: torch.device
    dim_order: tuple[int, ...]
    """The dimensions in memory order, from the largest stride to the smallest."""
    counter: int | None
    """The value of a scalar integer buffer, which Python code may read."""


@dataclass(frozen=True)
class ValueRef:
    """Stands for a tensor among the arguments of an `OpCall`: the index of its `Value`."""

    index: int


@dataclass(frozen=True)
class Value:
    """One tensor of the traced forward pass."""

    shape: tuple[int, ...]
    expanded: tuple[bool, ...]
    """Dimensions along which one entry is repeated (stride 0)."""
    storage: int
    name: str | None
    """The name of the parameter or buffer, if it is one."""
    computed: bool
    """True for the result of an operator; False for weights, inputs and tensors that the code holds elsewhere."""
    constant: Tensor | None
    """The data of a tensor that is neither computed nor a weight."""


@dataclass(frozen=True)
class OpCall:
    """One call of an ATen operator. Tensors in `args` and `kwargs` are `ValueRef`s."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    module: str


class NonTensorArgument(NamedTuple):
    """An argument that is not a tensor: a size, a dimension, an index."""

    dim: int | None
    """The dimension that it indexes, where that is known."""
    value: Any


@dataclass(frozen=True)
class FunctionCall:
    """One call of a torch function by the network's own code. Tensors are identified by their position among the leaves of
    the arguments or results."""

    name: str
    module_call: ModuleCall
    """The module call that makes it."""
    arguments: dict[int, int | None]
    """Its tensor arguments: position → value."""
    results: dict[int, int | None]
    op_calls: range
    """The operator calls that it runs."""
    non_tensors: tuple[NonTensorArgument, ...]


ABSENT = object()


class ReadValue(NamedTuple):
    """The value of a tensor that the network's code has read."""

    value: Tensor
    module: str
    """The module whose code reads it."""
    source: Tensor | None
    """The tensor itself; None for a parameter or buffer."""


class Stop(NamedTuple):
    """Where tracing stopped: at a value that depends on weights and inputs."""

    held: frozenset[int]
    """The values that the network's code still referred to, and may use in what was not traced."""
    op: OpOverload
    module: str


@dataclass
class Graph:
    values: list[Value] = field(default_factory=list)
    op_calls: list[OpCall] = field(default_factory=list)
    function_calls: list[FunctionCall] = field(default_factory=list)
    outputs: tuple[int, ...] = ()
    module_inputs: list[tuple[str, int]] = field(default_factory=list)
    """(module name, its first tensor input) for each module call, in order."""
    left_out: tuple[int, ...] = ()
    """Tensors that the network returns but `Neurons(outputs=…)` leaves out."""
    read_values: dict[str, ReadValue] = field(default_factory=dict)
    """Tensors whose values the network's code reads: by name, if they are parameters or buffers."""
    written: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Module → the attributes that its code has set in the forward pass, such as caches; tensors in them are zero."""
    overwritten: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The values of these attributes before the forward pass; `ABSENT` if there were none."""
    hooked: dict[str, list[Any]] = field(default_factory=dict)
    """Module → the code of forward hooks that the forward pass has registered on it (`hook_code`)."""
    decisions: tuple[str, ...] = ()
    """Places in the code that read a truth value of the inputs, or a random number."""
    finite_checks: dict[int, bool] = field(default_factory=dict)
    """Results of `isfinite`, `isinf` and `isnan` → their entries for finite values."""
    assumed_finite: dict[str, Stop] = field(default_factory=dict)
    """Places where the code has branched on such a check: the trace has the branch for finite values."""
    stop: Stop | None = None
    """Where tracing stopped, if the code reads a value that is not known."""
    error: Exception | None = None
    """The exception that ended the forward pass early, if any; `op_calls` end there."""
    error_module: str = ""
    """The module in which it was raised."""


def function_name(func: Callable[..., Any]) -> str:
    """The name of a torch function, or of the attribute that is read (`x.T`)."""
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", "") if name == "__get__" and hasattr(func, "__self__") else name


def leaves_of(tree: Any) -> list[Any]:
    """PyTorch's `tree_leaves`, with a shortcut for the containers that operators take and return."""
    result: list[Any] = []
    _add_leaves(tree, result)
    return result


def _add_leaves(tree: Any, result: list[Any]) -> None:
    kind = type(tree)
    if kind is tuple or kind is list:
        for part in tree:
            _add_leaves(part, result)
    elif kind is dict:
        for part in tree.values():
            _add_leaves(part, result)
    elif kind in _LEAVES or isinstance(tree, Tensor):
        result.append(tree)
    else:
        result += tree_leaves(tree)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """PyTorch's `tree_map`, with the same shortcut."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind(map_leaves(function, part) for part in tree)
    if kind is dict:
        return {key: map_leaves(function, part) for key, part in tree.items()}
    return function(tree) if kind in _LEAVES or isinstance(tree, Tensor) else tree_map(function, tree)


_LEAVES = frozenset({int, float, bool, complex, str, type(None), slice, type(...), torch.dtype, torch.device, ValueRef})


def produces_tensor(name: str, result: Any) -> bool:
    """Whether a torch function creates or changes a tensor. Others only query one (`x.size()`, `x.device`), and fake tensors
    answer some of these queries without a call."""
    return name == "__setitem__" or any(isinstance(leaf, Tensor) for leaf in leaves_of(result))


def non_tensor_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[NonTensorArgument, ...]:
    """The arguments beside tensors that can decide which channels a call reads or where it moves them."""
    if name == "__getitem__" and args[1:] and not isinstance(args[1], list):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return tuple(_index_arguments(index, args[0].dim()))
    leaves = leaves_of((args, kwargs))
    return tuple(
        NonTensorArgument(None, leaf)
        for leaf in leaves
        if leaf is None or isinstance(leaf, int | str | slice | torch.Size)
    )


def _index_arguments(index: tuple[Any, ...], ndim: int) -> Iterator[NonTensorArgument]:
    """The parts of x[index] with the dimensions that they index."""
    consumed = [part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1 for part in index]
    consumed = [
        0 if part is None or part is ... or isinstance(part, bool) else n
        for part, n in zip(index, consumed, strict=True)
    ]
    dim = 0
    for part, n in zip(index, consumed, strict=True):
        if part is ...:
            dim = ndim - sum(consumed) + dim
        elif isinstance(part, int | slice) and not isinstance(part, bool):
            yield NonTensorArgument(dim, part)
        elif not isinstance(part, Tensor):
            yield NonTensorArgument(None, str(part))  # a new dimension, or a list
        dim += n


def spec_of(tensor: Tensor) -> TensorSpec:
    is_counter = tensor.dim() == 0 and tensor.dtype == torch.long and not tensor.is_meta
    return TensorSpec(tensor.dtype, tensor.device, dim_order(tensor), int(tensor) if is_counter else None)


def dim_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions in memory order, from the largest stride to the smallest."""
    if tensor.is_contiguous():
        return tuple(range(tensor.dim()))
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))


def tensors_of(net: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by its first name, shared ones once, non-persistent buffers included."""
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def run_operator(op: OpOverload, args: Any, kwargs: Any, known: Mapping[int, Tensor | None]) -> Any:
    """Runs an operator on known values."""
    args, kwargs = tree_map(lambda leaf: known[leaf.index] if isinstance(leaf, ValueRef) else leaf, (args, kwargs))
    return op(*args, **kwargs)


def value_of_weights(graph: Graph, index: int, weights: Mapping[str, Tensor]) -> Tensor | None:
    """A value that the forward pass computes from parameters, buffers and constants alone, for these parameters and buffers;
    None if one of them is written in place, or tensors are after the value has been read."""
    needed, calls, storages = {index}, list[OpCall](), {graph.values[index].storage}
    read = next(
        number for number, call in enumerate(graph.op_calls) if index in call.reads and index not in call.writes
    )
    for number, call in reversed(list(enumerate(graph.op_calls))):
        if storages & {graph.values[i].storage for i in call.writes}:  # also through a view
            if number >= read:
                if set(call.reads) & set(call.writes):
                    return None
                continue  # another view, for a later product
            calls.insert(0, call)
            needed |= {*call.reads, *call.writes}
            storages |= {graph.values[i].storage for i in call.reads}
    written = {graph.values[i].storage for call in calls for i in call.writes if i in call.reads}
    if any(value.storage in written for value in graph.values if value.name is not None):
        return None
    found = {i: weights.get(graph.values[i].name or "", graph.values[i].constant) for i in needed}
    with torch.no_grad():
        for call in calls:
            results = tree_leaves(run_operator(call.op, call.args, call.kwargs, found))
            found |= zip(call.writes, [leaf for leaf in results if isinstance(leaf, Tensor)], strict=True)
    return found[index]
