"""Follow every channel through a recorded forward.

Each operator has a rule (`rules.py`) that says which labels its results carry, which slots it ties and which it fixes. An
operator without a rule fixes whatever flows into it. Nothing is guessed.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hgnp.pruning.coupling import Ties
from hgnp.pruning.graph import Graph, Ref, Step
from hgnp.pruning.labels import Labelled, Result, tail, tidy, varies, vector
from hgnp.pruning.rules import KEEP_FILLER, name_of, rule_for


@dataclass(frozen=True)
class Followed:
    """A step with what was known of its tensors before and after it."""

    step: Step
    reads: tuple[Labelled, ...]
    writes: tuple[Labelled, ...]


class Follower:
    """Walks one graph. `trail` holds a `Followed` for each step; `rows` and `blocks` what modules were seen to do."""

    def __init__(self, graph: Graph, ties: Ties, *, approximate: bool, lanes: bool = False) -> None:
        self.graph, self.ties, self.approximate = graph, ties, approximate
        self.lanes = lanes
        """Whether sums leave their operands untied (`lanes.py`)."""
        self.state = [self.initial(index) for index in range(len(graph.values))]
        self.trail: list[Followed] = []
        self.rows: dict[str, list[Tensor]] = {}
        """Module → the labels of its output channels, one entry for each weight it convolves or multiplies with."""
        self.blocks: dict[str, Tensor] = {}
        """Module → one label for each of its groups, where whole groups go."""
        self.consumed: list[tuple[int, int, Tensor]] = []
        """(step, value, label): where features are read and their channels end, in a product or a sum over them."""
        self._sharing: dict[int, list[int]] = {}

    def initial(self, index: int) -> Labelled:
        """What is known of a value before the first step."""
        value = self.graph.values[index]
        labels: list[Tensor] = []
        if value.name is not None:
            ndim = len(value.shape)
            labels = [
                vector(self.ties.slots[value.name, dim], dim, ndim)
                for dim in range(ndim)
                if (value.name, dim) in self.ties.slots
            ]
        return Labelled(value.shape, tuple(labels), weight=value.name is not None, repeated=value.repeated)

    def run(self) -> None:
        for index in range(len(self.graph.values)):
            self._sharing.setdefault(self.graph.values[index].storage, []).append(index)
        for step in self.graph.steps:
            self.step = step
            reads = tuple(self.state[index] for index in step.reads)
            known = {ref: self.state[ref] for ref in step.reads}
            args, kwargs = tree_map(partial(_lookup, known), (step.args, step.kwargs))
            rule = rule_for(step.op)
            results = rule(self, *args, **kwargs)
            if isinstance(results, Result):
                results = [results] * len(step.writes)
            for index, result in zip(step.writes, results, strict=True):
                self._put(index, result, reads, inherits=rule in KEEP_FILLER)
            self.trail.append(Followed(step, reads, tuple(self.state[index] for index in step.writes)))
        for index in self.graph.outputs:
            for label in self.state[index].labels:
                self.ties.fix(label, "it is the network's output")

    def _put(self, index: int, result: Result, reads: tuple[Labelled, ...], *, inherits: bool) -> None:
        value, before = self.graph.values[index], self.state[index]
        labels = []
        for label in tidy([tail(label, len(value.shape)) for label in result.labels]):
            if label.numel() == 1:
                self.ties.fix(label, self.why("a channel is picked out by its number"))
            else:
                labels.append(label)
        solid = [read for read in reads if not read.filler]
        after = Labelled(
            value.shape,
            tuple(labels),
            weight=bool(solid) and all(read.weight for read in solid),
            filler=result.filler if result.filler is not None else inherits and bool(reads) and not solid,
            repeated=value.repeated,
            aside=result.aside or (bool(reads) and all(read.aside for read in reads)),
            carried=result.carried if result.carried is not None else inherits and any(read.carried for read in reads),
        )
        if index in self.step.reads:  # written in place
            others = [other for other in self._sharing[value.storage] if other != index]
            if others and len(after.labels) > len(before.labels):
                for label in after.labels:
                    self.ties.fix(label, self.why("it is written into a part of another tensor"))
            if not result.filler:
                for other in others:
                    self.state[other] = replace(self.state[other], filler=False)
        self.state[index] = after

    # What rules are made of

    def why(self, what: str) -> str:
        where = f" in {self.step.module}" if self.step.module else ""
        return f"{what} ({name_of(self.step.op)}{where})"

    def saw_rows(self, labels: Tensor) -> None:
        seen = self.rows.setdefault(self.step.module, [])
        if not any(torch.equal(labels, rows) for rows in seen):
            seen.append(labels)

    def consume(self, operand: Labelled, label: Tensor) -> None:
        index = next(index for index in self.step.reads if self.state[index] is operand)
        self.consumed.append((len(self.trail), index, label))

    def tie(self, a: Tensor, b: Tensor) -> None:
        self.ties.tie(a, b, self.why("it meets a tensor that cannot be cut"))

    def fix(self, label: Tensor, what: str) -> None:
        self.ties.fix(label, self.why(what))

    def collapse(self, label: Tensor, keep: tuple[int, ...]) -> Tensor:
        """Tie the label along every dimension but `keep`, so that it varies along those alone."""
        for dim in varies(label):
            if dim not in keep:
                first = label.narrow(dim, 0, 1)
                self.tie(first, label)
                label = first
        return label

    def meet(self, operands: list[Labelled], ndim: int) -> list[Tensor]:
        """Entries at the same (broadcast) place stand and fall together."""
        met: list[Tensor] = []
        sums = self.lanes and name_of(self.step.op).removesuffix("_") in ("add", "sub")
        apart = sums and not any(operand.weight for operand in operands)
        for operand in operands:
            for label in operand.labels:
                label = tail(label, ndim)
                partner = next((m for m in met if set(varies(m)) & set(varies(label))), None)
                if partner is None:
                    met.append(label)
                elif not apart:
                    self.tie(partner, label)
        for label in met:
            dims = set(varies(label))
            for operand in operands:
                lead = ndim - len(operand.shape)
                if any(dims & set(varies(tail(other, ndim))) for other in operand.labels):
                    continue
                if any(dim >= lead and operand.solid(dim - lead) for dim in dims):
                    self.fix(label, "it meets a tensor that cannot be cut")
        return met


def _lookup(known: dict[int, Labelled], leaf: Any) -> Any:
    return known[leaf.index] if isinstance(leaf, Ref) else leaf
