"""Label propagation: carries the labels of every channel through a traced forward pass.

Each operator has a rule (`rules/`) that gives the labels of its results, unites the slots that must be removed together and
freezes those that must stay. An operator without a rule freezes everything that it reads. Nothing is guessed.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hgnp.pruning.coupling import Coupling
from hgnp.pruning.graph import Graph, OpCall, ValueRef, map_leaves
from hgnp.pruning.labels import (
    LabelledTensor,
    RuleResult,
    add_leading_dims,
    heads_dims,
    simplify,
    slots_in,
    varying_dims,
    vector_label,
)
from hgnp.pruning.rules import PRESERVES_FILLER, op_name, rearrangement, rule_for

FILL_VALUE = {"full": 1, "full_like": 1, "new_full": 2, "fill_": 1}
"""Operator → the position of the one value of its result."""


@dataclass(frozen=True)
class LabelledCall:
    """An operator call with the labels of its tensors before and after it."""

    call: OpCall
    reads: tuple[LabelledTensor, ...]
    writes: tuple[LabelledTensor, ...]


class LabelPropagation:
    """Propagates labels through one graph and records what it finds in a coupling.

    With `per_branch`, additions leave the slots of their operands apart (`branch_coupling.py`). `representatives` (slot → slot)
    stand for all slots of a head, so that labels do not vary inside it. `layers` are modules whose results are features, not
    weights, even if they read parameters alone: a learned query, the coordinates of a position bias.
    """

    def __init__(
        self,
        graph: Graph,
        coupling: Coupling,
        *,
        approximate: bool,
        per_branch: bool = False,
        representatives: Tensor | None = None,
        layers: Collection[str] = (),
    ) -> None:
        self.graph, self.coupling, self.approximate, self.per_branch = graph, coupling, approximate, per_branch
        self._representatives, self._layers = representatives, layers
        self.tensors = [self.initial(index) for index in range(len(graph.values))]
        """The labels of each value, as of the current operator call."""
        self.calls: list[LabelledCall] = []
        self.rows: dict[str, list[Tensor]] = {}
        """Module → the labels of its output channels, one entry for each weight it convolves or multiplies with."""
        self.groups: dict[str, Tensor] = {}
        """Module → one label for each of its groups, where whole groups are removed."""
        self.heads: dict[str, list[Tensor]] = {}
        """Module → labels of the heads that it multiplies with each other: one row per head, with the slots inside it."""
        self.consumed: list[tuple[int, int, Tensor]] = []
        """(operator call, value, label): where channels of features end, in a product or a sum over them."""
        self._same_storage: dict[int, list[int]] = {}
        self._newest = -1
        """The last value that exists at the current operator call."""
        self._original: dict[int, int] = {}
        """Alias of a whole tensor (`alias`, `detach`) → the first value of that tensor."""

    def initial(self, index: int) -> LabelledTensor:
        """The labels of a value before the first operator call."""
        value = self.graph.values[index]
        labels: list[Tensor] = []
        if value.name is not None:
            ndim = len(value.shape)
            labels = [
                vector_label(self._representative(self.coupling.slots[value.name, dim]), dim, ndim)
                for dim in range(ndim)
                if (value.name, dim) in self.coupling.slots
            ]
        is_weight = value.name is not None
        return LabelledTensor(value.shape, tuple(labels), is_weight, is_weight, expanded=value.expanded)

    def _representative(self, slots: Tensor) -> Tensor:
        return slots if self._representatives is None else self._representatives[slots]

    def run(self) -> None:
        for index in range(len(self.graph.values)):
            self._same_storage.setdefault(self.graph.values[index].storage, []).append(index)
        for call in self.graph.op_calls:
            self.call = call
            self._newest = max(self._newest, *call.reads, *call.writes)
            reads = tuple(self.tensors[index] for index in call.reads)
            known = {index: self.tensors[index] for index in call.reads}
            args, kwargs = map_leaves(partial(_lookup, known), (call.args, call.kwargs))
            rule = rule_for(call.op)
            results = rule(self, *args, **kwargs)
            if isinstance(results, RuleResult):
                results = [results] * len(call.writes)
            if op_name(call.op) in ("alias", "detach"):
                self._original[call.writes[0]] = self._original.get(call.reads[0], call.reads[0])
            for index, result in zip(call.writes, results, strict=True):
                self._store(index, result, reads, inherits=rule in PRESERVES_FILLER)
            self.calls.append(LabelledCall(call, reads, tuple(self.tensors[index] for index in call.writes)))
        for index in self.graph.outputs:
            for label in self.tensors[index].labels:
                self.coupling.freeze(label, "it is the network's output")

    def _store(self, index: int, result: RuleResult, reads: tuple[LabelledTensor, ...], *, inherits: bool) -> None:
        value, before = self.graph.values[index], self.tensors[index]
        labels = []
        for label in simplify([add_leading_dims(label, len(value.shape)) for label in result.labels]):
            if label.numel() == 1:
                self.freeze(label, "a channel is selected by a fixed index")
            else:
                labels.append(label)
        distinct = [read for read in reads if not read.filler]
        filler = result.filler if result.filler is not None else inherits and bool(reads) and not distinct
        computed = bool(distinct) and not filler  # `weight.new_zeros` is not
        after = LabelledTensor(
            value.shape,
            tuple(labels),
            is_weight=computed and all(read.is_weight for read in distinct) and not self.applies_layer(),
            shared=computed and all(read.shared for read in distinct),
            filler=filler,
            zero=filler and self._is_zero(reads),
            expanded=tuple(
                known or (size > 1 and dim in result.repeated)
                for dim, (size, known) in enumerate(zip(value.shape, value.expanded, strict=True))
            ),
            byproduct=result.byproduct or (bool(reads) and all(read.byproduct for read in reads)),
            passed_through=result.passed_through
            if result.passed_through is not None
            else slots_in([read.passed_through for read in reads if inherits]),
            nonzero_slots=slots_in([read.nonzero_slots for read in reads])
            if result.nonzero_slots is None
            else result.nonzero_slots,
        )
        if index in self.call.reads:  # written in place
            present = [other for other in self._same_storage[value.storage] if other <= self._newest]
            others = [other for other in present if not self._is_same(other, index)]
            if others and len(after.labels) > len(before.labels):
                for label in after.labels:
                    self.freeze(label, "it is written in place into part of another tensor")
            for other in others:  # also by a filler: entries elsewhere may have another value
                self.tensors[other] = replace(self.tensors[other], filler=False, zero=False, expanded=())
            for other in present:
                if self._is_same(other, index):
                    self.tensors[other] = after
        self.tensors[index] = after

    def _is_zero(self, reads: tuple[LabelledTensor, ...]) -> bool:
        """Whether the operator creates zeros, or copies or moves them."""
        name, args = op_name(self.call.op), self.call.args
        moves = rearrangement(self.call.op) is not None or name in (
            "clone",
            "contiguous",
            "detach",
            "alias",
            "_to_copy",
        )
        value = args[FILL_VALUE[name]] if name in FILL_VALUE and len(args) > FILL_VALUE[name] else None
        zeros = name in ("zeros", "new_zeros", "zeros_like", "zero_") or (isinstance(value, int | float) and value == 0)
        return zeros or (moves and all(read.zero for read in reads))

    def _is_same(self, one: int, other: int) -> bool:
        """Whether two values are the same tensor, or aliases of all of it."""
        return self._original.get(one, one) == self._original.get(other, other)

    # Called by the rules

    def applies_layer(self) -> bool:
        """Whether a linear layer is running: what it returns are features, even of parameters alone."""
        return self.call.module in self._layers and op_name(self.call.op) in ("mm", "addmm")

    def add_rows(self, labels: Tensor) -> None:
        """Notes the output channels of the module that is running."""
        known = self.rows.setdefault(self.call.module, [])
        if not any(torch.equal(labels, rows) for rows in known):
            known.append(labels)

    def add_heads(self, a: LabelledTensor, b: LabelledTensor) -> None:
        """Notes that features are multiplied head by head, if channels of both vary along leading dimensions."""
        if a.is_weight or b.is_weight or not set(heads_dims(a)) & set(heads_dims(b)):
            return
        for label in [label for operand in (a, b) for label in operand.labels if any(n > 1 for n in label.shape[:-2])]:
            self.heads.setdefault(self.call.module, []).append(label.flatten(0, -3).flatten(1))

    def consume(self, operand: LabelledTensor, label: Tensor) -> None:
        """Notes that the channels of an operand end here: a sum over them is exact only if removed ones read as zero."""
        self.freeze(label[torch.isin(label, operand.nonzero_slots)], "a softmax makes it nonzero")
        index = next(index for index in self.call.reads if self.tensors[index] is operand)
        self.consumed.append((len(self.calls), index, label))

    def union(self, a: Tensor, b: Tensor) -> None:
        """The slots in a and b, entry by entry, must be removed together."""
        self.coupling.union(a, b, self._at_call("it is combined with a tensor that cannot be cut"))

    def freeze(self, label: Tensor, reason: str) -> None:
        """The slots of a label must stay."""
        self.coupling.freeze(label, self._at_call(reason))

    def _at_call(self, reason: str) -> str:
        where = f" in {self.call.module}" if self.call.module else ""
        return f"{reason} ({op_name(self.call.op)}{where})"

    def is_coupled(self, grid: Tensor) -> bool:
        """Whether the slots in each row are removed together, and not all rows together."""
        roots = torch.tensor([self.coupling.find(slot) for slot in grid.flatten().tolist()]).view(grid.shape)
        return bool((roots == roots[:, :1]).all()) and len(roots[:, 0].unique()) > 1

    def collapse(self, label: Tensor, keep: tuple[int, ...]) -> Tensor:
        """Unites the slots along every dimension but `keep`, so that the label varies along those alone."""
        for dim in varying_dims(label):
            if dim not in keep:
                first = label.narrow(dim, 0, 1)
                self.union(first, label)
                label = first
        return label

    def broadcast(self, operands: list[LabelledTensor], ndim: int) -> list[Tensor]:
        """The labels of operands that are combined entry by entry, with broadcasting: entries at one position are removed
        together."""
        result: list[Tensor] = []
        adds = self.per_branch and op_name(self.call.op).removesuffix("_") in ("add", "sub")
        apart = adds and not any(operand.is_weight for operand in operands)
        for operand in operands:
            for label in operand.labels:
                label = add_leading_dims(label, ndim)
                dims = set(varying_dims(label))
                place = next((i for i, other in enumerate(result) if dims & set(varying_dims(other))), None)
                if place is None:
                    result.append(label)
                    continue
                if not apart:
                    self.union(result[place], label)
                # a norm's scale times channels in heads, which it repeats for
                if dims > set(varying_dims(result[place])):
                    result[place] = label
        return [self._along_shared_dims(label, operands) for label in result]

    def _along_shared_dims(self, label: Tensor, operands: list[LabelledTensor]) -> Tensor:
        """The label, if no operand without one has entries of its own along its dimensions. If one has along some of them,
        slots are united there: the same position is removed from every head. If one has along all, it is frozen."""
        ndim, dims = label.dim(), set(varying_dims(label))
        fixed: set[int] = set()
        for operand in operands:
            lead = ndim - len(operand.shape)
            if not any(dims & set(varying_dims(add_leading_dims(other, ndim))) for other in operand.labels):
                fixed |= {dim for dim in dims if dim >= lead and operand.distinct(dim - lead)}
        if fixed == dims:
            self.freeze(label, "it is combined with a tensor that cannot be cut")
        elif fixed:
            return self.collapse(label, tuple(dims - fixed))
        return label


def _lookup(known: dict[int, LabelledTensor], leaf: Any) -> Any:
    return known[leaf.index] if isinstance(leaf, ValueRef) else leaf
