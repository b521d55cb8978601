"""Pruning state: which neurons remain, where each one is now, and what a removal leaves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.rnn import pad_sequence

from hgnp.errors import InputError, did_you_mean
from hgnp.pruning.graph import Graph, tensors_of
from hgnp.pruning.labels import NO_SLOTS
from hgnp.pruning.layer_weights import summed_products
from hgnp.pruning.propagation import LabelPropagation
from hgnp.pruning.rules import op_name
from hgnp.pruning.selection import Units, as_positions
from hgnp.pruning.structure import Structure
from hgnp.pruning.widths import Shape


@dataclass(frozen=True)
class PruningState:
    structure: Structure
    layer_slots: Mapping[str, Tensor]
    """Layer → the slots of its neurons."""
    alive: Tensor
    """For every slot, whether it remains."""

    def remaining(self, layer: str) -> Tensor:
        """The slots of a layer's remaining neurons. A neuron's position is its index here."""
        return self.layer_slots[layer][self.alive[self.layer_slots[layer]]]

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """The current shape of every tensor."""
        return self.structure.shapes | self.structure.shapes_after(self.alive)

    @cached_property
    def count(self) -> int:
        """The number of neurons that can be removed."""
        return sum(int((~self.structure.frozen[self.remaining(layer)]).sum()) for layer in self.layer_slots)

    @cached_property
    def macs(self) -> int:
        """Multiply–accumulates of one forward pass of the example input."""
        return self.structure.macs(self.alive)

    @cached_property
    def units(self) -> Units:
        """The neurons that are removed together."""
        slots = {layer: self.remaining(layer) for layer in self.layer_slots}
        free = {layer: (~self.structure.frozen[mine]).nonzero().flatten() for layer, mine in slots.items()}
        sizes = torch.tensor([len(positions) for positions in free.values()], dtype=torch.long)
        return Units(
            list(slots),
            torch.arange(len(slots)).repeat_interleave(sizes),
            torch.cat([NO_SLOTS, *free.values()]),
            torch.cat([NO_SLOTS, *(self.structure.roots[mine[free[layer]]] for layer, mine in slots.items())]),
        )

    def without(self, selection: Mapping[str, Sequence[int]], roots: Tensor) -> "PruningState":
        """The state after removing the selection and everything coupled to it by `roots`. Validates the selection."""
        if not isinstance(selection, Mapping):
            raise InputError(f"selection must be a dict such as {{'layer': [0, 1]}}, got {selection!r}")
        structure = self.structure
        removed = torch.zeros(len(roots), dtype=torch.bool)
        for layer, positions in selection.items():
            if layer not in self.layer_slots:
                raise InputError(
                    f"selection must name layers with neurons, got {layer!r}{did_you_mean(layer, self.layer_slots)}"
                )
            remaining = self.remaining(layer)
            slots = remaining[as_positions(layer, positions, len(remaining))]
            frozen = slots[structure.frozen[slots]]
            if len(frozen):
                reason = structure.coupling.reason(int(frozen[0]))
                raise InputError(f"selection must hold prunable neurons, got frozen ones of {layer}: {reason}")
            removed[roots[slots]] = True
        left = PruningState(structure, self.layer_slots, self.alive & ~removed[roots])
        for layer in selection:
            if not len(left.remaining(layer)):
                raise InputError(f"selection must leave each layer a neuron, got all of {layer}")
        for (name, _), size in structure.sizes_after(left.alive).items():
            if not size:
                raise InputError(
                    f"selection must leave part of each tensor, got all of {name} with the coupled neurons"
                )
        return left

    def removed(self, left: "PruningState") -> dict[str, list[int]]:
        """Layer → the positions, in this state, of the neurons that are not in `left`."""
        return {layer: (~left.alive[self.remaining(layer)]).nonzero().squeeze(1).tolist() for layer in self.layer_slots}

    def weights(self, layer: str) -> Tensor:
        """The weights into a layer's remaining neurons, neurons first, as the layer computes them (weight norm, masks); those
        of a head are all its rows, joined."""
        if layer in self._heads:
            return self._head_weights(layer)
        rows, roots, net = self.remaining(layer), self.structure.roots, self.structure.net
        propagation, tensors = self.structure.propagations[False], tensors_of(net)
        parts = []
        for weights, slots in summed_products(
            propagation, layer, self.alive, tensors, lambda: self._graph_now(propagation)
        ):
            mine = torch.isin(roots[slots], roots[rows])
            if torch.equal(roots[slots[mine]], roots[rows]):
                parts.append(weights[mine.to(weights.device)])
        if parts:
            return parts[0] if len(parts) == 1 else torch.cat([part.flatten(1) for part in parts], 1)
        name, dim, slots = next(  # its weight is used by another module
            (name, dim, slots)
            for (name, dim), slots in self.structure.coupling.slots.items()
            if slots[0] <= rows[0] <= slots[-1]
        )
        weight, mine = tensors[name].detach(), torch.isin(slots[self.alive[slots]], rows)
        module = net.get_submodule(layer)
        if isinstance(module, _ConvNd) and module.transposed:  # (inputs, outputs of a group, *kernel), already cut
            return weight.unflatten(0, (module.groups, -1)).transpose(1, 2).flatten(0, 1)
        return weight.movedim(dim, 0)[mine.to(weight.device)]

    def _graph_now(self, propagation: LabelPropagation) -> Graph:
        """The trace of the network with the neurons that remain, which calls the same operators."""
        if propagation not in self._graphs:
            self._graphs[propagation] = self.structure.trace_now(self.structure.inputs, loss_needs_training_mode=False)
        return self._graphs[propagation]

    @cached_property
    def _graphs(self) -> WeakKeyDictionary[LabelPropagation, Graph]:
        return WeakKeyDictionary()

    @cached_property
    def _heads(self) -> dict[str, Tensor]:
        return self.structure.heads()

    def _head_weights(self, layer: str) -> Tensor:
        structure, parameters = self.structure, dict(self.structure.net.named_parameters())
        rows = [label for labels in structure.propagations[False].rows.values() for label in labels]
        firsts = {int(label[0]) for label in rows}
        heads = structure.roots[self.remaining(layer)].tolist()
        parts: dict[int, list[Tensor]] = {root: [] for root in heads}
        for (name, dim), slots in structure.coupling.slots.items():
            if name not in parameters or not any(int(slots[0]) <= first <= int(slots[-1]) for first in firsts):
                continue
            weight = parameters[name].detach().movedim(dim, 0)
            roots = structure.roots[slots[self.alive[slots]]]
            for root in heads:
                parts[root].append(weight[(roots == root).to(weight.device)].flatten())
        return pad_sequence([torch.cat(parts[root]) for root in heads], batch_first=True)

    def norm_scale(self, layer: str) -> Tensor | None:
        """The scale γ of the norm that reads the layer's output, or None where it has other entries. Heads have none."""
        if layer in self._heads:
            return None
        propagation = self.structure.propagations[False]
        outputs = {
            index
            for labelled in propagation.calls
            if labelled.call.module == layer
            for index, tensor in zip(labelled.call.writes, labelled.writes, strict=True)
            if not tensor.is_weight
        }
        parameters, roots = dict(self.structure.net.named_parameters()), self.structure.roots
        for labelled in propagation.calls:
            call = labelled.call
            if "norm" not in op_name(call.op) or call.reads[0] not in outputs or call.module == layer:
                continue
            for index, tensor in zip(call.reads[1:], labelled.reads[1:], strict=True):
                name = propagation.graph.values[index].name or ""
                same = [torch.equal(roots[label], roots[self.layer_slots[layer]]) for label in tensor.labels]
                if name.endswith("weight") and name in parameters and same == [True]:
                    return parameters[name].detach()
        return None
