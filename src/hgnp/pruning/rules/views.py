"""Operators that rearrange or look up entries. Rearrangements are applied to the labels themselves."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from hgnp.pruning.coupling import FROZEN
from hgnp.pruning.labels import LabelledTensor, RuleResult, compact, varying_dims, vector_label
from hgnp.pruning.rules.registry import RULES, op_name, rule, tensor_arguments

if TYPE_CHECKING:
    from hgnp.pruning.propagation import LabelPropagation

Rearrangement = Callable[[Tensor, Sequence[Any], dict[str, Any]], list[Tensor]]


def rearrangement(op: OpOverload) -> Rearrangement | None:
    """A function that rearranges a label as `op` does the entries of its first argument; None if `op` does anything else."""
    name = op_name(op)
    if name in RESHAPES:
        return lambda label, args, kwargs: [_reshaped(label, args[0])]
    if name == "pixel_shuffle":
        return lambda label, args, kwargs: [torch.nn.functional.pixel_shuffle(label, args[0])]
    if name == "constant_pad_nd":
        return lambda label, args, kwargs: [torch.nn.functional.pad(label, list(args[0]), value=FROZEN)]
    if RULES.get(name) in (rearrange, split):
        return lambda label, args, kwargs: _as_list(op(label, *args, **kwargs))
    return None


def _reshaped(label: Tensor, shape: Sequence[int]) -> Tensor:
    """The label reshaped, with size 1 along dimensions that are reshaped by themselves and along which it repeats, such as that
    of samples: a view of all their entries would have to be copied."""
    repeats = [size == 1 or stride == 0 for size, stride in zip(label.shape, label.stride(), strict=True)]
    sizes = resolved_sizes(label.shape, shape)
    for old, new in independent_dims(label.shape, sizes):
        if all(repeats[dim] for dim in old):
            for dim in old:
                label = label.narrow(dim, 0, 1)
            for dim in new:
                sizes[dim] = 1
    return label.reshape(sizes)


def resolved_sizes(old: Sequence[int], new: Sequence[int]) -> list[int]:
    """The sizes that a reshape is asked for, with the one that it infers (−1)."""
    known = math.prod(size for size in new if size != -1)
    return [math.prod(old) // known if size == -1 and known else size for size in new]


def independent_dims(old: Sequence[int], new: Sequence[int]) -> list[tuple[range, range]]:
    """The dimensions that a reshape splits or joins with each other, before and after. It does the same at each index of the
    others."""
    if not math.prod(old):
        return [(range(len(old)), range(len(new)))]
    found, ends = [], (0, 0)
    while ends != (len(old), len(new)):
        (first, other), products = ends, [1, 1]
        while first == ends[0] < len(old) or other == ends[1] < len(new) or products[0] != products[1]:
            if other == len(new) or (first < len(old) and products[0] <= products[1]):
                products[0] *= old[first]
                first += 1
            else:
                products[1] *= new[other]
                other += 1
        found.append((range(ends[0], first), range(ends[1], other)))
        ends = first, other
    return found


def permutes_dims(op: OpOverload) -> bool:
    """Whether `op` only permutes or inserts dimensions, so that a label need not be expanded first."""
    return op_name(op) in ("permute", "transpose", "t", "unsqueeze")


def _as_list(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


RESHAPES = ("view", "_unsafe_view", "reshape", "_reshape_alias")


@rule("permute", "transpose", "t", "expand", "slice", "select", "squeeze", "unsqueeze", "repeat", "roll", "flip",
      "unfold", "diagonal", "pixel_shuffle", "pixel_unshuffle", "split_with_sizes", "unsafe_split_with_sizes",
      "unbind", *RESHAPES)  # fmt: skip
def rearrange(p: "LabelPropagation", x: LabelledTensor, *args: Any, **kwargs: Any) -> list[RuleResult]:
    moved = rearrangement(p.call.op)
    assert moved is not None
    parts = [moved(label if permutes_dims(p.call.op) else label.expand(x.shape), args, kwargs) for label in x.labels]
    return [RuleResult([part[index] for part in parts]) for index in range(len(p.call.writes))]


@rule("split", "unsafe_split")
def split(p: "LabelPropagation", x: LabelledTensor, size: int, dim: int = 0) -> list[RuleResult]:
    """`chunk` splits in proportion to the width: the parts keep their channels only if each loses as many as the others."""
    results = rearrange(p, x, size, dim)
    assert isinstance(results, list)
    if x.shape[dim] % size == 0:
        for first, *others in zip(*(result.labels for result in results), strict=True):
            if first.shape[dim] > 1:
                for other in others:
                    p.union(compact(first), compact(other))
    return results


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(p: "LabelPropagation", x: LabelledTensor, groups: int) -> RuleResult:
    labels = []
    for label in x.labels:
        if label.shape[1] > 1:
            grid = label.unflatten(1, (groups, -1))
            p.union(grid.narrow(1, 0, 1), grid)
            label = grid.transpose(1, 2).flatten(1, 2)
        labels.append(label)
    return RuleResult(labels)


@rule("constant_pad_nd")
def pad(p: "LabelPropagation", x: LabelledTensor, amounts: Sequence[int], value: float = 0) -> RuleResult:
    labels = []
    for label in x.labels:
        for back in range(len(amounts) // 2):
            dim = len(x.shape) - 1 - back
            if label.shape[dim] > 1:  # along other dimensions the padding belongs to its channel
                before_after = [0] * (2 * back) + list(amounts[2 * back : 2 * back + 2])
                label = torch.nn.functional.pad(label, before_after, value=FROZEN)
        labels.append(label)
    return RuleResult(labels)


@rule("cat")
def cat(p: "LabelPropagation", parts: Sequence[LabelledTensor], dim: int = 0) -> RuleResult:
    parts = [part for part in parts if part.shape != (0,)]  # code may start a concatenation from an empty tensor
    ndim = len(parts[0].shape)
    dim %= ndim
    pieces, across = [], []
    for part in parts:
        piece = part.along(dim)
        piece = torch.full((1,) * ndim, FROZEN) if piece is None else piece
        pieces.append(piece.expand((*piece.shape[:dim], part.shape[dim], *piece.shape[dim + 1 :])))
        for label in part.labels:
            if label.shape[dim] > 1 and label is not part.along(dim):  # rows and columns of positions, flattened
                p.freeze(label, "several of its dimensions are concatenated as one")
        rest = tuple(label for label in part.labels if label.shape[dim] == 1)
        narrow = (*part.shape[:dim], 1, *part.shape[dim + 1 :])
        across.append(replace(part, shape=narrow, labels=rest))
    full = [max(piece.shape[d] for piece in pieces) for d in range(ndim)]
    joined = torch.cat([p.expand([p.shape[d] if d == dim else full[d] for d in range(ndim)]) for p in pieces], dim)
    return RuleResult([joined, *p.broadcast(across, ndim)])


@rule("stack")
def stack(p: "LabelPropagation", parts: Sequence[LabelledTensor], dim: int = 0) -> RuleResult:
    ndim = len(parts[0].shape) + 1
    dim %= ndim
    wider = [
        replace(
            part,
            shape=(*part.shape[:dim], 1, *part.shape[dim:]),
            labels=tuple(label.unsqueeze(dim) for label in part.labels),
            expanded=(),
        )
        for part in parts
    ]
    return cat(p, wider, dim)  # type: ignore[return-value]


# Lookups


@rule("index")
def index(p: "LabelPropagation", x: LabelledTensor, indices: Sequence[LabelledTensor | None]) -> RuleResult:
    looked_up = [dim for dim, entry in enumerate(indices) if entry is not None]
    zeros = [None if entry is None else torch.zeros(entry.shape, dtype=torch.long) for entry in indices]
    _freeze_indices(p, tensor_arguments(indices))
    kept = _freeze_along(p, x, looked_up)
    return RuleResult([torch.ops.aten.index.Tensor(label.expand(x.shape), zeros) for label in kept.labels])


@rule("index_select")
def index_select(p: "LabelPropagation", x: LabelledTensor, dim: int, entries: LabelledTensor) -> RuleResult:
    _freeze_indices(p, [entries])
    return RuleResult(list(_freeze_along(p, x, [dim % len(x.shape)]).labels))


@rule("gather")
def gather(p: "LabelPropagation", x: LabelledTensor, dim: int, entries: LabelledTensor, **kwargs: Any) -> RuleResult:
    dims = [d for d in range(len(x.shape)) if d == dim % len(x.shape) or entries.shape[d] != x.shape[d]]
    return RuleResult(p.broadcast([_freeze_along(p, x, dims), _freeze_along(p, entries, dims)], len(x.shape)))


@rule("index_add", "index_copy", "index_reduce", "scatter", "scatter_add", "scatter_reduce")
def scatter(
    p: "LabelPropagation",
    x: LabelledTensor,
    dim: int,
    entries: LabelledTensor,
    source: LabelledTensor | float,
    *args: Any,
    **kwargs: Any,
) -> RuleResult:
    """Entries along `dim`, such as the nodes of a graph, are looked up by index; along other dimensions, such as that of their
    features, those at one position are combined."""
    ndim = len(x.shape)
    operands = [each for each in (x, source) if isinstance(each, LabelledTensor) and len(each.shape) == ndim]
    if len(entries.shape) == ndim:
        operands.append(entries)
    else:
        _freeze_indices(p, [entries])
    # where sizes differ, only a part of a tensor is read or written
    dims = [d for d in range(ndim) if d == dim % ndim or any(each.shape[d] != x.shape[d] for each in operands)]
    return RuleResult(p.broadcast([_freeze_along(p, each, dims) for each in operands], ndim), filler=False)


@rule("embedding")
def embedding(
    p: "LabelPropagation", table: LabelledTensor, entries: LabelledTensor, *args: Any, **kwargs: Any
) -> RuleResult:
    ndim = len(entries.shape) + 1
    _freeze_indices(p, [entries])
    return RuleResult(
        [vector_label(label.reshape(-1), ndim - 1, ndim) for label in _freeze_along(p, table, [0]).labels]
    )


def _freeze_indices(p: "LabelPropagation", indices: Sequence[LabelledTensor]) -> None:
    for entry in indices:
        for label in entry.labels:
            p.freeze(label, "it holds indices, not channels")


def _freeze_along(p: "LabelPropagation", x: LabelledTensor, dims: Sequence[int]) -> LabelledTensor:
    """The tensor without its labels along `dims`, which are frozen."""
    for label in x.labels:
        if set(varying_dims(label)) & set(dims):
            p.freeze(label, "its entries are looked up by index")
    return replace(x, labels=tuple(label for label in x.labels if not set(varying_dims(label)) & set(dims)))
