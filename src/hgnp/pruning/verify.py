"""Compare a trial with the forward it should equal.

A trial is the network's own code run at smaller shapes. Every step must be the step it was, with the same constants, and give
the old result with the dead entries left out, in the old order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hgnp.errors import InputError, first_line
from hgnp.pruning.graph import Graph, Step, Value
from hgnp.pruning.labels import Labelled, compact, varies
from hgnp.pruning.propagation import Followed, Follower
from hgnp.pruning.rules import KEEP_FILLER, RESHAPES, filler, mover, name_of, rule_for, turns

ANOTHER_PATH = "the smaller network takes another path through its code"
SIZED = (*RESHAPES, "expand", "repeat", "native_group_norm", "native_layer_norm", "_fused_rms_norm", "constant_pad_nd")
LAYOUT = ("clone", "contiguous", "alias", "detach", "mm", "bmm", "addmm", "baddbmm", "mv", "add", "add_")


@dataclass(frozen=True)
class Misfit:
    """Why a cut does not fit, and the dead slots that were there when it showed."""

    reason: str
    slots: Tensor


def keep_masks(labelled: Labelled, alive: Tensor) -> list[Tensor | None]:
    """Which places along each dimension are left; None where all are. ValueError if no rectangle is left."""
    masks: list[Tensor | None] = [None] * len(labelled.shape)
    for label in labelled.labels:
        left = compact(alive[label])
        if left.numel() == 1:
            if not bool(left):
                raise InputError("nothing is left of a tensor")
            continue
        dims = varies(left)
        outer = torch.ones((1,) * left.dim(), dtype=torch.bool)
        for dim in dims:
            others = tuple(d for d in dims if d != dim)
            mask = left.any(others) if others else left
            mask = mask.reshape(-1)
            outer = outer & mask.reshape([-1 if d == dim else 1 for d in range(left.dim())])
            current = masks[dim]
            masks[dim] = mask if current is None else current & mask
        if not torch.equal(outer.expand(left.shape), left):
            raise InputError("what is left of a tensor is no rectangle")
    return masks


def shape_after(labelled: Labelled, alive: Tensor) -> tuple[int, ...]:
    masks = keep_masks(labelled, alive)
    return tuple(size if mask is None else int(mask.sum()) for size, mask in zip(labelled.shape, masks, strict=True))


def compare(before: Follower, graph: Graph, alive: Tensor, aligned: bool) -> Misfit | None:
    trail = [followed for followed in before.trail if not _copies(followed.step)]
    steps = [step for step in graph.steps if not _copies(step)]
    old, new = _Names(before.graph.steps), _Names(graph.steps)
    for followed, step in zip(trail, steps, strict=False):
        problem = _difference(before.graph, followed, step, graph, alive, aligned)
        if problem is None and old.of(followed.step) != new.of(step):
            problem = ANOTHER_PATH
        if problem is not None:
            return _misfit(followed, alive, problem)
    if graph.error is not None:
        return _misfit(trail[min(len(steps), len(trail) - 1)], alive, f"the network's code: {first_line(graph.error)}")
    if len(steps) != len(trail):
        return _misfit(trail[-1], alive, ANOTHER_PATH)
    return None


def _copies(step: Step) -> bool:
    """Whether a step copies a tensor. Torch does so where the layout in memory asks for it, which may change with a width."""
    return name_of(step.op) in ("clone", "contiguous")


class _Names:
    """Numbers for values in the order in which they appear, the same for a tensor and its copies."""

    def __init__(self, steps: list[Step]) -> None:
        self._original: dict[int, int] = {}
        for step in steps:
            if _copies(step):
                self._original[step.writes[0]] = self._original.get(step.reads[0], step.reads[0])
        self._number: dict[int, int] = {}

    def of(self, step: Step) -> list[int]:
        values = [self._original.get(index, index) for index in step.reads + step.writes]
        return [self._number.setdefault(value, len(self._number)) for value in values]


def _difference(
    before: Graph, followed: Followed, step: Step, graph: Graph, alive: Tensor, aligned: bool
) -> str | None:
    """What is wrong with a step of the trial, if anything is."""
    was = followed.step
    if _kind(step) != _kind(was) or len(step.reads) != len(was.reads) or len(step.writes) != len(was.writes):
        return ANOTHER_PATH
    for labelled, index in zip(followed.writes, step.writes, strict=True):
        if labelled.aside or labelled.filler:
            continue
        try:
            due = shape_after(labelled, alive)
        except ValueError as error:
            return str(error)
        found = graph.values[index].shape
        # one entry repeated fits whatever it is repeated for
        if len(found) != len(due) or any(
            size != wanted and not labelled.loose(dim)
            for dim, (size, wanted) in enumerate(zip(found, due, strict=True))
        ):
            return f"the network's code fixes a size: {found} came out where {due} was due"
    read = [graph.values[index] for index in step.reads]
    constants = zip((before.values[index] for index in was.reads), read, strict=True)
    if (
        _numbers(step, followed) != _numbers(was, followed)
        or not all(_same_constant(old, new) for old, new in constants)
        or (rule_for(was.op) not in (*KEEP_FILLER, filler) and any(map(_stretched, followed.reads, read)))
    ):
        return "a number in the network's code depends on the width"
    if aligned and mover(was.op) and not turns(was.op) and not _all_alive(followed.reads[0], alive):
        return _misplaced(followed, step, graph, alive)
    return None


def _kind(step: Step) -> str:
    name = name_of(step.op)
    return "view" if name in RESHAPES else str(step.op)


def _misplaced(followed: Followed, step: Step, graph: Graph, alive: Tensor) -> str | None:
    """Whether the smaller tensor's entries go where the larger one's went."""
    source, moved = followed.reads[0], mover(step.op)
    assert moved is not None
    sources = keep_masks(source, alive)
    for label in source.labels:
        cut = _cut(label, [m if label.shape[d] > 1 else None for d, m in enumerate(sources)])
        now = moved(cut.expand(graph.values[step.reads[0]].shape), step.args[1:], step.kwargs)
        then = moved(label.expand(source.shape), followed.step.args[1:], followed.step.kwargs)
        for labelled, left, whole in zip(followed.writes, now, then, strict=True):
            if not torch.equal(left, _cut(whole, keep_masks(labelled, alive))):
                return "the network's code moves its channels to other places when there are fewer"
    return None


def alike(before: Follower, graph: Graph, alive: Tensor) -> bool:
    """Whether two forwards do the same kinds of things, however torch lays out the tensors in between."""

    def kinds(steps: list[Step]) -> list[str]:
        return [name_of(step.op) for step in steps if mover(step.op) is None and name_of(step.op) not in LAYOUT]

    outputs = [shape_after(before.state[index], alive) for index in before.graph.outputs]
    return (
        graph.error is None
        and kinds(before.graph.steps) == kinds(graph.steps)
        and outputs == [graph.values[index].shape for index in graph.outputs]
    )


def _cut(tensor: Tensor, masks: list[Tensor | None]) -> Tensor:
    for dim, mask in enumerate(masks):
        if mask is not None:
            tensor = tensor.index_select(dim, mask.nonzero().squeeze(1))
    return tensor


def _all_alive(labelled: Labelled, alive: Tensor) -> bool:
    return all(bool(alive[label].all()) for label in labelled.labels)


def _numbers(step: Step, followed: Followed) -> list[int | float]:
    """The numbers among a step's arguments that must not change with the width; sizes may."""
    name = name_of(step.op)
    args: Sequence[Any] = step.args
    if name in ("full", "new_full", "full_like", "fill", "fill_", "scalar_tensor"):
        args = args[-1:]
    elif name in ("slice", "select", "split", "split_with_sizes"):
        place = 2 if name.startswith("split") else 1
        dim = args[place] if len(args) > place else 0
        args = args if followed.reads[0].along(dim) is None else []
    elif name == "convolution":
        args = args[3:8]
    elif name in SIZED or rule_for(step.op) is filler:
        args = []
    return [leaf for leaf in tree_leaves((args, step.kwargs)) if isinstance(leaf, int | float)]


def _stretched(labelled: Labelled, value: Value) -> bool:
    """Whether a tensor that fits whatever width it is given was given another one."""
    return any(
        size != old and (labelled.filler or labelled.loose(dim))
        for dim, (old, size) in enumerate(zip(labelled.shape, value.shape, strict=False))
    )


def _same_constant(one: Value, other: Value) -> bool:
    if one.constant is other.constant or one.constant is None or other.constant is None:
        return one.constant is other.constant
    return one.constant.shape == other.constant.shape and torch.equal(one.constant, other.constant)


def _misfit(followed: Followed, alive: Tensor, problem: str) -> Misfit:
    labels = [label.reshape(-1) for labelled in followed.reads + followed.writes for label in labelled.labels]
    slots = torch.unique(torch.cat(labels)) if labels else torch.zeros(0, dtype=torch.long)
    where = f" in {followed.step.module}" if followed.step.module else ""
    return Misfit(f"{problem} ({name_of(followed.step.op)}{where})", slots[~alive[slots]])
