"""The network as it stands: slots, what ties them, and whether a cut would really fit.

`Structure` records the forward in eval and in train mode (auxiliary heads live in one of them only), follows the channels
through both, and can try a cut: the network's own code runs on tensors of the smaller shapes, and every step must produce
exactly the old result with the dead entries left out, in the old order. A hard-coded `view`, a fixed split point or a
constant that depends on the width is caught there.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hgnp.errors import InputError, first_line
from hgnp.pruning.coupling import Settled, Ties, UnsettledError
from hgnp.pruning.graph import Graph, Inputs, kind_of, tensors_of
from hgnp.pruning.labels import compact, varies
from hgnp.pruning.propagation import Followed, Follower
from hgnp.pruning.rules import name_of
from hgnp.pruning.trace import UNSEEN, quiet_norms, record
from hgnp.pruning.verify import Misfit, alike, compare, shape_after
from hgnp.pruning.widths import Shape, stated_widths
from hgnp.removal import Removal


@dataclass(frozen=True)
class Recorded:
    """A network's forward in eval (False) and in train mode."""

    graphs: Mapping[bool, Graph]
    quiet: bool
    """Whether batch norms had to be in eval mode for it, as each sees one value a channel."""


class PathError(InputError):
    """The forward takes a path that is not known."""

    def __init__(self, module: str, reason: str) -> None:
        where = f"in {module}" if module else "in its own forward"
        super().__init__(
            f"net: {where} it takes a path that was not recorded ({reason}); make Neurons with an example_input that takes it"
        )


class Structure:
    """`seen` is what was recorded of the network as it is, if it was: it is not recorded again."""

    def __init__(
        self,
        net: nn.Module,
        inputs: Inputs,
        *,
        approximate: bool,
        lanes: bool = False,
        seen: Recorded | None = None,
    ) -> None:
        self.net, self.inputs = net, inputs
        self._approximate, self._lanes = approximate, lanes
        self.shapes: dict[str, Shape] = {name: tuple(t.shape) for name, t in tensors_of(net).items()}
        self.kinds = {name: kind_of(tensor) for name, tensor in tensors_of(net).items()}  # the network may move later
        self.ties = Ties(self.shapes)
        self.quiet: bool = seen is not None and seen.quiet
        self.tried: tuple[Tensor, Recorded] | None = None
        """The last cut that was tried and fits, and what was recorded of it."""
        self.followers: dict[bool, Follower] = {}
        for training in (False, True):
            graph = self._record(training) if seen is None else seen.graphs[training]
            follower = self.followers[training] = Follower(graph, self.ties, approximate=approximate, lanes=lanes)
            if graph.error is not None:
                everything = torch.arange(len(self.ties))
                self.ties.fix(everything, f"the forward depends on its data ({first_line(graph.error)})")
            follower.run()
        self._fix_unused()
        self._make_rectangular(self.ties, *self.followers.values())
        self.settle()

    @property
    def recorded(self) -> Recorded:
        return Recorded({training: follower.graph for training, follower in self.followers.items()}, self.quiet)

    def settle(self) -> None:
        """Take note of what has been tied and fixed."""
        self.roots = self.ties.roots()
        self.fixed = self.ties.fixed(self.roots)

    def _record(self, training: bool) -> Graph:
        graph = record(self.net, self.inputs, training=training)
        if training and isinstance(graph.error, ValueError) and "more than 1 value per channel" in str(graph.error):
            self.quiet = True
            graph = record(self.net, self.inputs, training=True, adjust=lambda: quiet_norms(self.net))
        if graph.error is not None and not isinstance(graph.error, UNSEEN):
            where = f" in {graph.where}" if graph.where else ""
            mode = "train" if training else "eval"
            raise InputError(
                f"net(example_input) failed{where} ({mode} mode): {first_line(graph.error)}"
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

    @staticmethod
    def _make_rectangular(ties: Ties, *followers: Follower) -> None:
        """A tensor loses whole slices. Where a label varies along several dimensions, as after splitting channels into
        groups, the same place in every group goes: code fixes how many groups there are, rarely how large they are."""
        labels = {
            id(label): label
            for follower in followers
            for labelled in follower.state
            for label in labelled.labels
            if len(varies(label)) > 1
        }
        changed = bool(labels)
        while changed:
            changed = False
            for label in labels.values():  # in the order of the forward: the split comes before what is made of it
                spread = compact(ties.roots_of(label))
                for dim in varies(spread)[:-1]:
                    first = spread.narrow(dim, 0, 1)
                    ties.tie(first, spread, "its channels are laid out in a way that cannot be cut")
                    spread, changed = first, True

    def path(self, inputs: Inputs) -> Follower:
        """The forward of these inputs in eval mode. PathError if it ties or fixes more than what was recorded."""
        everyone = torch.ones(len(self.ties), dtype=torch.bool)
        adjust = self._adjust(everyone)
        graph = record(self.net, inputs, training=False, shapes=self.shapes, adjust=adjust, read=True)
        if graph.error is not None:
            raise PathError(graph.where, first_line(graph.error)) from graph.error
        ties = Settled(self.ties)
        follower = Follower(graph, ties, approximate=self._approximate, lanes=self._lanes)
        try:
            follower.run()
            self._make_rectangular(ties, follower)
        except UnsettledError as error:
            raise PathError(follower.step.module, f"more neurons belong together there, or stay: {error}") from error
        return follower

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

    def removal(self, before: Tensor, after: Tensor) -> Removal:
        """What goes from one state of life to the next, in positions as they are before."""
        slices: dict[str, dict[int, Tensor]] = defaultdict(dict)
        for (name, dim), slots in self.ties.slots.items():
            stay = after[slots[before[slots]]]
            if not bool(stay.all()):
                slices[name][dim] = stay.nonzero().squeeze(1)
        widths = {}
        for name, module, stated in self.widths_after(after):
            changed = {attribute: value for attribute, value in stated.items() if getattr(module, attribute) != value}
            if changed:
                widths[name] = changed
        return Removal(dict(slices), widths)

    def misfit(self, alive: Tensor, *, aligned: bool = True) -> Misfit | None:
        """Run the network's own code at the smaller shapes. None if every step gives what it should.

        `aligned=False` compares shapes alone, for cuts that knowingly put other channels side by side.
        """
        found = self._try(alive, lambda before, graph: compare(before, graph, alive, aligned))
        if found is None:
            return None
        # Torch itself takes other paths (fewer copies) when a width is down to one. Then the cut is tried with two left, and
        # at one the code must run, do the same kinds of things and end in the same shapes.
        wider = self._two_of_each(alive)
        if torch.equal(wider, alive) or self._try(wider, lambda before, graph: compare(before, graph, wider, aligned)):
            return found
        return self._try(alive, lambda before, graph: None if alike(before, graph, alive) else found)

    def _try(self, alive: Tensor, judge: Callable[[Follower, Graph], Misfit | None]) -> Misfit | None:
        shapes = self.shapes | self.shapes_after(alive)
        adjust, graphs = self._adjust(alive), {}
        for training, follower in self.followers.items():
            graph = record(self.net, self.inputs, training=training, shapes=shapes, kinds=self.kinds, adjust=adjust)
            graphs[training] = graph
            found = judge(follower, graph)
            if found is not None:
                return found
        self.tried = alive, Recorded(graphs, self.quiet)
        return None

    def _adjust(self, alive: Tensor) -> Callable[[], None]:
        """Sets the widths that modules state, for the time of a trial."""
        attributes = [(module, widths) for _, module, widths in self.widths_after(alive) if widths]

        def adjust() -> None:
            for module, widths in attributes:
                module.__dict__.update(widths)
            if self.quiet:
                quiet_norms(self.net)

        return adjust

    def _two_of_each(self, alive: Tensor) -> Tensor:
        """The cut with something brought back wherever a tensor was left with one entry along a dimension."""
        alive = alive.clone()
        labels = [label for f in self.followers.values() for labelled in f.state for label in labelled.labels]
        for label in labels:
            left = alive[label]
            for dim in varies(label):
                stay = left.transpose(0, dim).reshape(label.shape[dim], -1).any(1)
                if int(stay.sum()) == 1:
                    dead = label.transpose(0, dim)[~stay].flatten()[0]
                    alive[self.roots == self.roots[dead]] = True
                    left = alive[label]
        return alive

    def macs(self, alive: Tensor) -> int:
        """Multiply–accumulates of convolutions and matrix products in one eval forward of the example input."""
        return sum(_macs(followed, alive) for followed in self.followers[False].trail)


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
