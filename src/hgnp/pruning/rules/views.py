"""Operators that move entries about: they are applied to the labels themselves."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from hgnp.pruning.coupling import FIXED
from hgnp.pruning.labels import Labelled, Result, compact, varies, vector
from hgnp.pruning.rules.registry import RULES, name_of, rule, tensors

if TYPE_CHECKING:
    from hgnp.pruning.propagation import Follower

Mover = Callable[[Tensor, Sequence[Any], dict[str, Any]], list[Tensor]]


def mover(op: OpOverload) -> Mover | None:
    """How `op` moves the entries of its first argument about, if that is all it does."""
    name = name_of(op)
    if name in RESHAPES:
        return lambda label, args, kwargs: [label.reshape(tuple(args[0]))]
    if name == "pixel_shuffle":
        return lambda label, args, kwargs: [torch.nn.functional.pixel_shuffle(label, args[0])]
    if RULES.get(name) in (move, split):
        return lambda label, args, kwargs: _listed(op(label, *args, **kwargs))
    return None


def turns(op: OpOverload) -> bool:
    """Whether `op` only reorders dimensions, so that a label need not be spread out to be moved."""
    return name_of(op) in ("permute", "transpose", "t", "unsqueeze")


def _listed(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


RESHAPES = ("view", "_unsafe_view", "reshape", "_reshape_alias")


@rule("permute", "transpose", "t", "expand", "slice", "select", "squeeze", "unsqueeze", "repeat", "roll", "flip",
      "unfold", "diagonal", "pixel_shuffle", "pixel_unshuffle", "split_with_sizes", "unsafe_split_with_sizes",
      "unbind", *RESHAPES)  # fmt: skip
def move(f: "Follower", x: Labelled, *args: Any, **kwargs: Any) -> list[Result]:
    moved = mover(f.step.op)
    assert moved is not None
    parts = [moved(label if turns(f.step.op) else label.expand(x.shape), args, kwargs) for label in x.labels]
    return [Result([part[place] for part in parts]) for place in range(len(f.step.writes))]


@rule("split", "unsafe_split")
def split(f: "Follower", x: Labelled, size: int, dim: int = 0) -> list[Result]:
    """`chunk` cuts where the width says: the parts keep their places only if each loses as much as the others."""
    results = move(f, x, size, dim)
    assert isinstance(results, list)
    if x.shape[dim] % size == 0:
        for first, *others in zip(*(result.labels for result in results), strict=True):
            if first.shape[dim] > 1:
                for other in others:
                    f.tie(compact(first), compact(other))
    return results


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(f: "Follower", x: Labelled, groups: int) -> Result:
    labels = []
    for label in x.labels:
        if label.shape[1] > 1:
            grid = label.unflatten(1, (groups, -1))
            f.tie(grid.narrow(1, 0, 1), grid)
            label = grid.transpose(1, 2).flatten(1, 2)
        labels.append(label)
    return Result(labels)


@rule("constant_pad_nd")
def pad(f: "Follower", x: Labelled, amounts: Sequence[int], value: float = 0) -> Result:
    labels = []
    for label in x.labels:
        for place in range(len(amounts) // 2):
            dim = len(x.shape) - 1 - place
            if label.shape[dim] > 1:  # elsewhere the padding belongs to the channel it pads
                before_after = [0] * (2 * place) + list(amounts[2 * place : 2 * place + 2])
                label = torch.nn.functional.pad(label, before_after, value=FIXED)
        labels.append(label)
    return Result(labels)


@rule("cat")
def cat(f: "Follower", parts: Sequence[Labelled], dim: int = 0) -> Result:
    parts = [
        part for part in parts if part.shape != (0,)
    ]  # an old idiom: concatenation that starts from an empty tensor
    ndim = len(parts[0].shape)
    dim %= ndim
    pieces, across = [], []
    for part in parts:
        piece = part.along(dim)
        piece = torch.full((1,) * ndim, FIXED) if piece is None else piece
        pieces.append(piece.expand((*piece.shape[:dim], part.shape[dim], *piece.shape[dim + 1 :])))
        for label in part.labels:
            if label.shape[dim] > 1 and label is not part.along(dim):  # rows and columns of places, flattened
                f.fix(label, "several of its dimensions are concatenated as one")
        rest = tuple(label for label in part.labels if label.shape[dim] == 1)
        narrow = (*part.shape[:dim], 1, *part.shape[dim + 1 :])
        across.append(replace(part, shape=narrow, labels=rest))
    full = [max(piece.shape[d] for piece in pieces) for d in range(ndim)]
    joined = torch.cat([p.expand([p.shape[d] if d == dim else full[d] for d in range(ndim)]) for p in pieces], dim)
    return Result([joined, *f.meet(across, ndim)])


@rule("stack")
def stack(f: "Follower", parts: Sequence[Labelled], dim: int = 0) -> Result:
    ndim = len(parts[0].shape) + 1
    dim %= ndim
    wider = [
        replace(
            part,
            shape=(*part.shape[:dim], 1, *part.shape[dim:]),
            labels=tuple(label.unsqueeze(dim) for label in part.labels),
            repeated=(),
        )
        for part in parts
    ]
    return cat(f, wider, dim)  # type: ignore[return-value]


# Looked up


@rule("index")
def index(f: "Follower", x: Labelled, indices: Sequence[Labelled | None]) -> Result:
    looked_up = [dim for dim, entry in enumerate(indices) if entry is not None]
    zeros = [None if entry is None else torch.zeros(entry.shape, dtype=torch.long) for entry in indices]
    _fix_places(f, tensors(indices))
    kept = _keep_outside(f, x, looked_up)
    return Result([torch.ops.aten.index.Tensor(label.expand(x.shape), zeros) for label in kept.labels])


@rule("index_select")
def index_select(f: "Follower", x: Labelled, dim: int, entries: Labelled) -> Result:
    _fix_places(f, [entries])
    return Result(list(_keep_outside(f, x, [dim % len(x.shape)]).labels))


@rule("gather")
def gather(f: "Follower", x: Labelled, dim: int, entries: Labelled, **kwargs: Any) -> Result:
    dims = [d for d in range(len(x.shape)) if d == dim % len(x.shape) or entries.shape[d] != x.shape[d]]
    return Result(f.meet([_keep_outside(f, x, dims), _keep_outside(f, entries, dims)], len(x.shape)))


@rule("embedding")
def embedding(f: "Follower", table: Labelled, entries: Labelled, *args: Any, **kwargs: Any) -> Result:
    ndim = len(entries.shape) + 1
    _fix_places(f, [entries])
    return Result([vector(label.reshape(-1), ndim - 1, ndim) for label in _keep_outside(f, table, [0]).labels])


def _fix_places(f: "Follower", indices: Sequence[Labelled]) -> None:
    for entry in indices:
        for label in entry.labels:
            f.fix(label, "it holds places, not channels")


def _keep_outside(f: "Follower", x: Labelled, dims: Sequence[int]) -> Labelled:
    """Without the labels along `dims`: those are fixed."""
    for label in x.labels:
        if set(varies(label)) & set(dims):
            f.fix(label, "its entries are looked up by number")
    return replace(x, labels=tuple(label for label in x.labels if not set(varies(label)) & set(dims)))
