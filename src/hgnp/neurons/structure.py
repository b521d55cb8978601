"""The network as it stands: slots, what ties them, and whether a cut would really fit.

`Structure` records the forward in eval and in train mode (auxiliary heads live in one of them only), follows the channels
through both, and can try a cut: the network's own code runs on tensors of the smaller shapes, and every step must produce
exactly the old result with the dead entries left out, in the old order. A hard-coded `view`, a fixed split point or a
constant that depends on the width is caught there.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hgnp.neurons.follow import Followed, Follower
from hgnp.neurons.graph import UNSEEN, Graph, Step, Value, kind_of, quiet_norms, record, tensors_of
from hgnp.neurons.labels import Labelled, compact, varies
from hgnp.neurons.rules import elementwise, filler, mover, name_of, rule_for, turns
from hgnp.neurons.ties import Ties
from hgnp.neurons.widths import Shape, stated_widths

ANOTHER_PATH = "the smaller network takes another path through its code"
LAYOUT = ("clone", "contiguous", "alias", "detach", "mm", "bmm", "addmm", "baddbmm", "mv", "add", "add_")
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Misfit:
    """Why a cut does not fit, and the dead slots that were there when it showed."""

    reason: str
    slots: Tensor


class Structure:
    def __init__(self, net: nn.Module, inputs: Inputs, *, approximate: bool, lanes: bool = False) -> None:
        self.net, self.inputs = net, inputs
        self.shapes: dict[str, Shape] = {name: tuple(t.shape) for name, t in tensors_of(net).items()}
        self.kinds = {name: kind_of(tensor) for name, tensor in tensors_of(net).items()}  # the network may move later
        self.ties = Ties(self.shapes)
        self.quiet = False
        self.followers: dict[bool, Follower] = {}
        for training in (False, True):
            graph = self._record(training)
            follower = self.followers[training] = Follower(graph, self.ties, approximate=approximate, lanes=lanes)
            if graph.error is not None:
                everything = torch.arange(len(self.ties))
                self.ties.fix(everything, f"the forward depends on its data ({_first_line(graph.error)})")
            follower.run()
        self._fix_unused()
        self._make_rectangular()
        self.settle()

    def settle(self) -> None:
        """Take note of what has been tied and fixed."""
        self.roots = self.ties.roots()
        self.fixed = torch.tensor([self.ties.reason(slot) is not None for slot in range(len(self.ties))])

    def _record(self, training: bool) -> Graph:
        graph = record(self.net, self.inputs, training=training)
        if training and isinstance(graph.error, ValueError) and "more than 1 value per channel" in str(graph.error):
            self.quiet = True
            graph = record(self.net, self.inputs, training=True, adjust=lambda: quiet_norms(self.net))
        if graph.error is not None and not isinstance(graph.error, UNSEEN):
            where = f" in {graph.where}" if graph.where else ""
            mode = "train" if training else "eval"
            raise ValueError(
                f"net(example_input) failed{where} ({mode} mode): {_first_line(graph.error)}"
            ) from graph.error
        return graph

    def _fix_unused(self) -> None:
        used = {
            follower.graph.values[index].name
            for follower in self.followers.values()
            for step in follower.graph.steps
            for index in step.reads
        }
        storages: dict[int, str] = {}
        for name, tensor in tensors_of(self.net).items():
            owner = storages.setdefault(tensor.untyped_storage().data_ptr(), name) if tensor.numel() else name
            for dim in range(tensor.dim()):
                slots = self.ties.slots.get((name, dim))
                if slots is not None and name not in used:
                    self.ties.fix(slots, "it is not used in the forward")
                if owner != name and slots is not None:
                    for shared in (name, owner):
                        self.ties.fix(self.slots_of(shared), f"{owner} and {name} are two tensors in one memory")

    def slots_of(self, name: str) -> Tensor:
        mine = [slots for (owner, _), slots in self.ties.slots.items() if owner == name]
        return torch.cat(mine) if mine else torch.zeros(0, dtype=torch.long)

    def _make_rectangular(self) -> None:
        """A tensor loses whole slices. Where a label varies along several dimensions, as after splitting channels into
        groups, the same place in every group goes: code fixes how many groups there are, rarely how large they are."""
        labels = {
            id(label): label
            for follower in self.followers.values()
            for labelled in follower.state
            for label in labelled.labels
            if len(varies(label)) > 1
        }
        changed = bool(labels)
        while changed:
            changed = False
            for label in labels.values():  # in the order of the forward: the split comes before what is made of it
                spread = compact(self.ties.roots_of(label))
                for dim in varies(spread)[:-1]:
                    first = spread.narrow(dim, 0, 1)
                    self.ties.tie(first, spread, "its channels are laid out in a way that cannot be cut")
                    spread, changed = first, True

    # Cuts

    def shapes_after(self, alive: Tensor) -> dict[str, Shape]:
        """The shapes that a cut changes."""
        after = {name: list(shape) for name, shape in self.shapes.items()}
        for (name, dim), slots in self.ties.slots.items():
            after[name][dim] = int(alive[slots].sum())
        return {name: tuple(shape) for name, shape in after.items() if tuple(shape) != self.shapes[name]}

    def widths_after(self, alive: Tensor) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
        """(name, module, attributes) for every module that states widths."""
        after = self.shapes_after(alive)
        first_inputs: dict[str, Shape] = {}
        groups: dict[str, int] = {}
        for follower in self.followers.values():
            for name, index in follower.graph.calls:
                first_inputs[name] = shape_after(follower.state[index], alive)
            groups |= {name: int(alive[block].sum()) for name, block in follower.blocks.items()}
        names = {id(tensor): name for name, tensor in tensors_of(self.net).items()}
        for name, module in self.net.named_modules():
            own = dict(module.named_parameters(remove_duplicate=False)) | dict(
                module.named_buffers(remove_duplicate=False)
            )

            def shape(key: str, own: dict[str, Any] = own) -> Shape | None:
                full = names[id(own[key])] if key in own else None
                return None if full is None else after.get(full, self.shapes[full])

            yield name, module, stated_widths(module, shape, first_inputs.get(name), groups.get(name))

    def misfit(self, alive: Tensor, *, aligned: bool = True) -> Misfit | None:
        """Run the network's own code at the smaller shapes. None if every step gives what it should.

        `aligned=False` compares shapes alone, for cuts that knowingly put other channels side by side.
        """
        found = self._try(alive, lambda before, graph: _compare(before, graph, alive, aligned))
        if found is None or ANOTHER_PATH not in found.reason:
            return found
        # Torch itself takes other paths (fewer copies) when a width is down to one. Then the cut is tried with two left, and
        # at one the code must run, do the same kinds of things and end in the same shapes.
        wider = self._two_of_each(alive)
        if torch.equal(wider, alive) or self._try(wider, lambda before, graph: _compare(before, graph, wider, aligned)):
            return found
        return self._try(alive, lambda before, graph: None if _alike(before, graph, alive) else found)

    def _try(self, alive: Tensor, judge: Callable[[Follower, Graph], Misfit | None]) -> Misfit | None:
        shapes = self.shapes_after(alive)
        attributes = [(module, widths) for _, module, widths in self.widths_after(alive) if widths]

        def adjust() -> None:
            for module, widths in attributes:
                module.__dict__.update(widths)
            if self.quiet:
                quiet_norms(self.net)

        for training, follower in self.followers.items():
            graph = record(self.net, self.inputs, training=training, shapes=shapes, kinds=self.kinds, adjust=adjust)
            found = judge(follower, graph)
            if found is not None:
                return found
        return None

    def _two_of_each(self, alive: Tensor) -> Tensor:
        """The cut with something brought back wherever a single slot was left."""
        alive = alive.clone()
        for slots in self.ties.slots.values():
            if int(alive[slots].sum()) == 1:
                alive[self.roots == self.roots[slots[~alive[slots]][0]]] = True
        return alive

    def macs(self, alive: Tensor) -> int:
        """Multiply–accumulates of convolutions and matrix products in one eval forward of the example input."""
        return sum(_macs(followed, alive) for followed in self.followers[False].trail)


def keep_masks(labelled: Labelled, alive: Tensor) -> list[Tensor | None]:
    """Which places along each dimension are left; None where all are. ValueError if no rectangle is left."""
    masks: list[Tensor | None] = [None] * len(labelled.shape)
    for label in labelled.labels:
        left = compact(alive[label])
        if left.numel() == 1:
            if not bool(left):
                raise ValueError("nothing is left of a tensor")
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
            raise ValueError("what is left of a tensor is no rectangle")
    return masks


def shape_after(labelled: Labelled, alive: Tensor) -> Shape:
    masks = keep_masks(labelled, alive)
    return tuple(size if mask is None else int(mask.sum()) for size, mask in zip(labelled.shape, masks, strict=True))


def _compare(before: Follower, graph: Graph, alive: Tensor, aligned: bool) -> Misfit | None:
    trail = before.trail
    for followed, step in zip(trail, graph.steps, strict=False):
        problem = _difference(before.graph, followed, step, graph, alive, aligned)
        if problem is not None:
            return _misfit(followed, alive, problem)
    if graph.error is not None:
        return _misfit(
            trail[min(len(graph.steps), len(trail) - 1)], alive, f"the network's code: {_first_line(graph.error)}"
        )
    if len(graph.steps) != len(trail):
        return _misfit(trail[-1], alive, ANOTHER_PATH)
    return None


def _difference(
    before: Graph, followed: Followed, step: Step, graph: Graph, alive: Tensor, aligned: bool
) -> str | None:
    """What is wrong with a step of the trial, if anything is."""
    was = followed.step
    if step.op is not was.op or step.reads != was.reads or step.writes != was.writes:
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
    if _numbers(step) != _numbers(was) or not all(_same_constant(before.values[i], graph.values[i]) for i in was.reads):
        return "a number in the network's code depends on the width"
    if aligned and mover(was.op) and not turns(was.op) and not _all_alive(followed.reads[0], alive):
        return _misplaced(followed, step, graph, alive)
    return None


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


def _alike(before: Follower, graph: Graph, alive: Tensor) -> bool:
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


def _numbers(step: Step) -> list[int | float]:
    """The numbers among a step's arguments that must not change with the width; sizes may."""
    name = name_of(step.op)
    if name in ("full", "new_full", "full_like", "fill", "fill_", "scalar_tensor"):
        leaves = list(step.args[-1:])
    elif rule_for(step.op) is elementwise or (not step.reads and rule_for(step.op) is not filler):
        leaves = tree_leaves((step.args, step.kwargs))
    else:
        leaves = tree_leaves(step.kwargs)
    return [leaf for leaf in leaves if isinstance(leaf, int | float)]


def _same_constant(one: Value, other: Value) -> bool:
    if one.constant is None or other.constant is None:
        return one.constant is other.constant
    return torch.equal(one.constant, other.constant)


def _misfit(followed: Followed, alive: Tensor, problem: str) -> Misfit:
    labels = [label.reshape(-1) for labelled in followed.reads + followed.writes for label in labelled.labels]
    slots = torch.unique(torch.cat(labels)) if labels else torch.zeros(0, dtype=torch.long)
    where = f" in {followed.step.module}" if followed.step.module else ""
    return Misfit(f"{problem} ({name_of(followed.step.op)}{where})", slots[~alive[slots]])


def _macs(followed: Followed, alive: Tensor) -> int:
    name = name_of(followed.step.op)
    if name == "convolution":
        x, w = (shape_after(read, alive) for read in followed.reads[:2])
        transposed = followed.step.args[6]
        return math.prod(x if transposed else shape_after(followed.writes[0], alive)) * math.prod(w[1:])
    if name in ("mm", "bmm", "addmm", "baddbmm", "mv"):
        a, b = (shape_after(read, alive) for read in followed.reads[-2:])
        return math.prod(a) * (b[-1] if len(b) > 1 else 1)
    return 0


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
