"""The structure of a network: its traced forward passes, the slots of its tensors and their coupling.

`Structure` traces the forward pass in evaluation and in training mode (an auxiliary head exists in one of them only) and
propagates labels through both. It also says which shapes, widths and multiply–accumulates a cut leaves, and traces the
network at the smaller shapes; `verify.py` checks those traces.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_map

from hgnp.errors import InputError, first_line, is_too_few_values
from hgnp.pruning.coupling import FROZEN, Coupling, NewCouplingError, ReadOnlyCoupling
from hgnp.pruning.graph import ABSENT, Graph, Inputs, Outputs, Stop, TensorSpec, tensors_of
from hgnp.pruning.labels import LabelledTensor, compact, shape_after, varying_dims
from hgnp.pruning.macs import PRODUCT_NAMES, macs_of, measured_macs
from hgnp.pruning.propagation import LabelledCall, LabelPropagation
from hgnp.pruning.rules import op_name
from hgnp.pruning.trace import UNTRACEABLE, Decisions, hook_code, trace_forward
from hgnp.pruning.widths import WEIGHT_NAMES, Shape, integer_attributes, stated_widths, with_integers
from hgnp.removal import Removal
from hgnp.state_guards import norms_and_dropout_to_eval

Attributes = tuple[nn.Module, Mapping[str, Any]]
"""A module and values for its attributes."""


@dataclass(frozen=True)
class TracedForward:
    """A network's forward pass in evaluation (False) and in training mode (True)."""

    graphs: Mapping[bool, Graph]
    eval_norms: bool
    """Whether batch norms were in evaluation mode for both, as the example input has one value per channel."""
    undecidable: frozenset[str] = frozenset()
    """Places in the code whose decisions by the inputs may take another path."""
    head_labels: Sequence[tuple[str, Tensor]] | None = None
    """(module, label) wherever features are multiplied head by head, if that was looked for."""


class PathError(InputError):
    """The forward pass takes a path that was not traced."""

    def __init__(self, module: str, reason: str) -> None:
        where = self.where = module or "its own forward"
        self.reason = reason
        super().__init__(
            f"net must take a traced path, got another one in {where} ({reason}); create Neurons with an example_input that "
            "takes it"
        )


def batch_norms_to_eval(net: nn.Module) -> None:
    """Puts batch norms in evaluation mode: one value per channel cannot be normalised over the batch."""
    for module in net.modules():
        if isinstance(module, _BatchNorm):
            module.training = False


def _equal(now: Tensor, before: Tensor) -> bool:
    return torch.equal(now.detach(), before.to(now.device, now.dtype))


def where(module: str) -> str:
    return f" in {module}" if module else " in the network's own forward"


def depends_on_data(stop: Stop) -> str:
    return f"the forward pass depends on its data{where(stop.module)} ({op_name(stop.op)})"


class Structure:
    """`specs` are those of the network that got `inputs`, with which its passes are traced: it may have moved since.
    `traced` is the trace of the network as it is, if there is one already. With `per_branch`, additions leave their operands
    uncoupled. `without_heads` names modules in which positions inside heads are removed from every head, not whole heads.
    `caches` are attributes, by module, that the forward pass computes again at other shapes: before a trace they are set to
    these values, which are of other shapes, so that each trace computes them."""

    def __init__(
        self,
        net: nn.Module,
        inputs: Inputs,
        specs: Mapping[str, TensorSpec],
        *,
        approximate: bool,
        per_branch: bool = False,
        without_heads: frozenset[str] = frozenset(),
        outputs: Outputs | None = None,
        traced: TracedForward | None = None,
        caches: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.net, self.inputs, self.specs, self.outputs = net, inputs, specs, outputs
        self.without_heads = without_heads
        self.caches = caches or {}
        self._undecidable = frozenset[str]() if traced is None else traced.undecidable
        self._approximate, self._per_branch = approximate, per_branch
        self.shapes: dict[str, Shape] = {name: tuple(t.shape) for name, t in tensors_of(net).items()}
        self._eval_norms = traced is not None and traced.eval_norms
        self._initial: dict[str, dict[str, Any]] = defaultdict(dict)
        """Module → attributes that the forward pass sets as the first trace found them; every later trace finds them so too."""
        self._hooked: dict[str, list[Any]] = {}
        """Module → hooks that the forward pass registers in its first call (`Graph.hooked`): every trace finds none of them."""
        self._hooks = {name: set(module._forward_hooks) for name, module in net.named_modules()}
        """Those that are there before."""
        graphs = {mode: self._trace(mode) if traced is None else traced.graphs[mode] for mode in (False, True)}
        for graph in graphs.values():
            for name, before in graph.overwritten.items():
                found = {key: value for key, value in before.items() if key not in self.caches.get(name, ())}
                self._initial[name] = found | self._initial[name]
            self._hooked |= graph.hooked
        self.untraced_macs = 0
        self._representatives: Tensor | None = None
        known = None if traced is None else traced.head_labels
        self._head_labels = self._find_heads(graphs) if known is None else known
        self._representatives = self._find_representatives()
        self.coupling = Coupling(self.shapes)
        if self._representatives is not None:
            self.coupling.union(torch.arange(len(self.coupling)), self._representatives, "it belongs to a head")
        self.attributes: dict[str, dict[str, Tensor]] = {}
        """Module → integer attribute (`integer_attributes`) → the slots that it counts, for attributes that must change with a
        cut: a number of heads, the width of a split."""
        self.equal_widths: list[tuple[Tensor, Tensor]] = []
        """Slots that are removed together only because the code takes their numbers to be equal."""
        self.propagations: dict[bool, LabelPropagation] = {}
        for training, graph in graphs.items():
            propagation = self.propagations[training] = self._propagation(graph, self.coupling)
            if graph.error is not None and graph.stop is None:
                everything = torch.arange(len(self.coupling))
                self.coupling.freeze(everything, f"the forward pass depends on its data ({first_line(graph.error)})")
            self._run(propagation)
        self._freeze_unused()
        self._freeze_other_rows()
        _make_rectangular(self.coupling, *self.propagations.values())
        self.update_roots()

    def inputs_beside_network(self) -> Inputs:
        """The inputs on the devices that the network has moved to since."""
        tensors = tensors_of(self.net)
        moved = {spec.device: tensors[name].device for name, spec in self.specs.items() if name in tensors}

        def beside(leaf: Any) -> Any:
            return leaf.to(moved.get(leaf.device, leaf.device)) if isinstance(leaf, Tensor) else leaf

        inputs: Inputs = tree_map(beside, self.inputs)
        return inputs

    @property
    def traced(self) -> TracedForward:
        graphs = {training: propagation.graph for training, propagation in self.propagations.items()}
        return TracedForward(graphs, self._eval_norms, self._undecidable, self._head_labels)

    def update_roots(self) -> None:
        """Reads the roots and frozen slots off the coupling, after it has changed."""
        self.roots = self.coupling.roots()
        self.frozen = self.coupling.frozen(self.roots)
        self.__dict__.pop("all_of_a_tensor", None)

    @cached_property
    def all_of_a_tensor(self) -> list[Tensor]:
        """Sets of roots that are, together, all of a tensor along a dimension: a weight, or a part of a layer's output."""
        labels = [label for each in self.propagations.values() for tensor in each.tensors for label in tensor.labels]
        distinct = {id(label): label for label in [*self.coupling.slots.values(), *labels]}
        sets = [label.flatten() for label in distinct.values() if not bool(self.frozen[label].any())]
        return [torch.tensor(found) for found in sorted({tuple(self.roots[each].unique().tolist()) for each in sets})]

    def emptying(self, removed: Tensor) -> set[int]:
        """The roots, of those in a mask over all slots, that would leave nothing of a tensor; empty if none would."""
        emptied = [roots for roots in self.all_of_a_tensor if bool(removed[roots].all())]
        return set(torch.cat(emptied).tolist()) if emptied else set()

    def unite(self, equal_widths: list[tuple[Tensor, Tensor]]) -> None:
        """Couples slots, entry by entry, whose numbers must be equal."""
        self.equal_widths = [*self.equal_widths, *equal_widths]
        for one, other in equal_widths:
            self.coupling.union(
                one, other, "the network's code takes its width to be that of a tensor that cannot be cut"
            )
        _make_rectangular(self.coupling, *self.propagations.values())
        self.update_roots()

    def _propagation(self, graph: Graph, coupling: Coupling) -> LabelPropagation:
        return LabelPropagation(
            graph,
            coupling,
            approximate=self._approximate,
            per_branch=self._per_branch,
            representatives=self._representatives,
            layers={name for name, module in self.net.named_modules() if type(module) is nn.Linear},
        )

    def _find_representatives(self) -> Tensor | None:
        """Slot → the first slot of the same tensor that belongs to the same head; None without heads.

        Channels that are split into heads could lose whole heads or the same position of every head. Where features are
        multiplied head by head, whole heads are removed, which leaves the scale of attention and rotary embeddings as they are.
        """
        heads = Coupling(self.shapes)
        for name, label in self._head_labels:
            if name not in self.without_heads:
                heads.union(label[:, :1], label, "it belongs to a head")
        roots, result = heads.roots(), torch.arange(len(heads))
        for slots in heads.slots.values():
            found, where = torch.unique(roots[slots], return_inverse=True)
            if 1 < len(found) < len(slots):
                first = torch.full((len(found),), len(heads)).scatter_reduce(0, where, slots, "amin")
                result[slots] = first[where]
        return None if torch.equal(result, torch.arange(len(heads))) else result

    def _find_heads(self, graphs: Mapping[bool, Graph]) -> list[tuple[str, Tensor]]:
        """(module, label) wherever features are multiplied head by head."""
        found = []
        for graph in graphs.values():
            if any(op_name(call.op) in ("bmm", "baddbmm") for call in graph.op_calls):
                propagation = self._propagation(graph, Coupling(self.shapes))
                propagation.run()
                found += [(name, label) for name, labels in propagation.heads.items() for label in labels]
        return found

    def _trace(self, training: bool) -> Graph:
        graph = self._trace_forward(self.inputs, training)
        if training and is_too_few_values(graph.error):
            self._eval_norms = True
            graph = self._trace_forward(self.inputs, training)
        undecidable = {place for place in graph.decisions if not self._is_check(graph, training, place)}
        if undecidable:
            self._undecidable |= undecidable
            graph = self._trace_forward(self.inputs, training)
        if graph.error is not None and not isinstance(graph.error, UNTRACEABLE):
            where = f" in {graph.error_module}" if graph.error_module else ""
            mode = "train" if training else "eval"
            raise InputError(
                f"net must run on example_input in {mode} mode, but failed{where}: {first_line(graph.error)}"
            ) from graph.error
        return graph

    def _is_check(self, graph: Graph, training: bool, place: str) -> bool:
        """Whether the code raises an error, or does the same, if the decision at this place has the other outcome."""
        other = self._trace_forward(self.inputs, training, other=place)
        if other.error is not None and not isinstance(other.error, UNTRACEABLE):
            return True
        same = [call.op for call in other.op_calls] == [call.op for call in graph.op_calls]
        return same and (other.stop and other.stop[1:]) == (graph.stop and graph.stop[1:])

    def _trace_forward(
        self,
        inputs: Inputs,
        training: bool,
        attributes: Sequence[Attributes] = (),
        *,
        loss_needs_training_mode: bool = False,
        other: str = "",
        **options: Any,
    ) -> Graph:
        """The trace with these attributes of modules, and with the caches of other shapes; with `loss_needs_training_mode`,
        norms and dropout are in evaluation mode, and with `other` the decision at this place of the code has the other
        outcome."""

        def trace(caches: Mapping[str, Mapping[str, Any]]) -> Graph:
            def adjust() -> None:
                for name, before in self._initial.items():
                    for key, value in before.items():
                        modules[name].__dict__.pop(key, None)
                        if value is not ABSENT:
                            modules[name].__dict__[key] = copy.copy(value) if isinstance(value, dict | list) else value
                for name, registered in self._hooked.items():
                    hooks, left = modules[name]._forward_hooks, list(registered)
                    for number, hook in list(hooks.items()):  # the first call's come before those that are added later
                        if number not in self._hooks[name] and hook_code(hook) in left:
                            left.remove(hook_code(hook))
                            del hooks[number]
                for module, values in [*((modules[name], values) for name, values in caches.items()), *attributes]:
                    module.__dict__.update(values)
                if self._eval_norms:
                    batch_norms_to_eval(self.net)
                if loss_needs_training_mode:
                    norms_and_dropout_to_eval(self.net)

            decisions = Decisions(other, self._undecidable)
            specs = self.specs if inputs is self.inputs else {}
            return trace_forward(
                self.net, inputs, training=training, specs=specs, adjust=adjust, outputs=self.outputs, decisions=decisions,
                **options,
            )  # fmt: skip

        modules = dict(self.net.named_modules())
        graph = trace(self.caches)
        if any(graph.written[name].keys() & values.keys() for name, values in self.caches.items()):
            return graph
        return trace({}) if self.caches else graph  # these shapes are by chance those of the caches

    def _run(self, propagation: LabelPropagation) -> None:
        """Propagates labels. Freezes tensors whose values the code reads."""
        for name, read in propagation.graph.read_values.items():
            if read.source is None:
                propagation.coupling.freeze(self._slots_of(name), f"its value is read{where(read.module)}")
        propagation.run()
        self._freeze_at_stop(propagation)

    def _freeze_at_stop(self, propagation: LabelPropagation) -> None:
        """Where tracing has stopped, freezes whatever the code may still use: tensors that it holds, and weights that it has
        not used yet."""
        graph, coupling = propagation.graph, propagation.coupling
        if graph.stop is None:
            return
        reason = depends_on_data(graph.stop)
        for index in sorted(graph.stop.held):
            if graph.values[index].name is None:
                for label in propagation.tensors[index].labels:
                    coupling.freeze(label, f"{reason}, where it is still in use")
        used = {graph.values[index].name for call in graph.op_calls for index in call.reads}
        for name in self.shapes:
            if name not in used:
                coupling.freeze(self._slots_of(name), f"{reason}, before it is used")

    def _freeze_unused(self) -> None:
        used = {
            propagation.graph.values[index].name
            for propagation in self.propagations.values()
            for call in propagation.graph.op_calls
            for index in call.reads
        }
        storages: dict[int, str] = {}
        for name, tensor in tensors_of(self.net).items():
            owner = storages.setdefault(tensor.untyped_storage().data_ptr(), name) if tensor.numel() else name
            for dim in range(tensor.dim()):
                slots = self.coupling.slots.get((name, dim))
                if slots is not None and name not in used:
                    self.coupling.freeze(slots, "it is not used in the forward pass")
                if owner != name and slots is not None:
                    for shared in (name, owner):
                        self.coupling.freeze(self._slots_of(shared), f"{owner} and {name} share memory")

    def _freeze_other_rows(self) -> None:
        """Freezes the neurons of a layer that are not the rows of its weight parameter, as under `orthogonal`: that parameter
        states the layer's width."""
        for name, module in self.net.named_modules():
            if not isinstance(module, nn.Linear | _ConvNd) or getattr(module, "transposed", False):
                continue
            rows = self._weight_rows(name, module)
            neurons = [label for each in self.propagations.values() for label in each.rows.get(name, [])]
            neurons += [slots for key, slots in self.coupling.slots.items() if key == (f"{name}.bias".lstrip("."), 0)]
            if rows is None or not neurons:
                continue
            roots = set(self.coupling.roots_of(rows).tolist())
            if all(roots.isdisjoint(self.coupling.roots_of(each).tolist()) for each in neurons):
                for each in neurons:
                    self.coupling.freeze(each, "its weight is computed from a tensor with other rows")

    def _slots_of(self, name: str) -> Tensor:
        mine = [slots for (owner, _), slots in self.coupling.slots.items() if owner == name]
        return torch.cat(mine) if mine else torch.zeros(0, dtype=torch.long)

    @property
    def stops(self) -> list[Stop]:
        """Where tracing has stopped, or has only followed the branch for finite values."""
        graphs = [propagation.graph for propagation in self.propagations.values()]
        stopped = [graph.stop for graph in graphs if graph.stop is not None]
        return stopped + [stop for graph in graphs for stop in graph.assumed_finite.values()]

    def neuron_slots(self) -> dict[str, Tensor]:
        """Layer → the slots of its neurons: rows of weights, and a slot of each head under its attention module. Rows that
        belong to heads are not neurons themselves."""
        rows, heads = self.layer_rows(), self.heads()
        none = torch.zeros(0, dtype=torch.long)
        in_heads = torch.isin(self.roots, self.roots[torch.cat([*heads.values(), none])])
        result = {}
        for name, _ in self.net.named_modules():
            own = rows.get(name, none)
            slots = torch.cat([own[~in_heads[own]], heads.get(name, none)])
            if len(slots):
                result[name] = slots
        return result

    def heads(self) -> dict[str, Tensor]:
        """Module that multiplies features head by head → a slot of each head. What is removed together is one head: a key/value
        head and its queries, several rows of one weight at least."""
        several = self._roots_with_several_rows()
        result = {}
        for name, _ in self.net.named_modules():
            if name in self.without_heads:
                continue
            labels = [label for propagation in self.propagations.values() for label in propagation.heads.get(name, [])]
            firsts = [slot for label in labels for slot in label[:, 0].tolist()]
            by_root = {int(root): slot for root, slot in zip(self.roots[firsts].tolist(), firsts, strict=True)}
            slots = [slot for root, slot in by_root.items() if root in several]
            if slots:
                result[name] = torch.tensor(slots)
        return result

    def counting_attributes(self, roots: Tensor) -> dict[str, dict[str, Tensor]]:
        """Module → integer attribute → slots, where the attribute equals the number of these slots, which lie along a dimension
        of a tensor with the groups in `roots`: the number of heads, the width of all heads or of a part of the channels.
        The tensor is one that the module's calls read or write or, where its forward does not run but other modules call its
        methods, a weight of it: the position bias of each head in a module with a method `get_bias`."""
        own = torch.isin(self.roots, roots)
        modules = dict(self.net.named_modules())
        result: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, labels in self._labels_in_modules().items():
            numbers = {key: value for key, value in integer_attributes(modules[name]).items() if value > 1}
            for label in [label for label in labels if numbers and bool(own[label].any())]:
                for dim in varying_dims(label):
                    slots = _one_period(label.movedim(dim, 0).reshape(label.shape[dim], -1)[:, 0])
                    every_group = len(self.roots[slots].unique()) == len(self.roots[label].unique())
                    for key, value in numbers.items():
                        if value == len(slots) and every_group:
                            result[name].setdefault(key, slots)
        return result

    def _labels_in_modules(self) -> dict[str, list[Tensor]]:
        """Module → the labels that its calls write and read; if its forward does not run, those of its weights."""
        result: dict[str, list[Tensor]] = defaultdict(list)
        running: set[str] = set()
        for propagation in self.propagations.values():
            running |= {name for name, _ in propagation.graph.module_inputs}
            for labelled in propagation.calls:
                tensors = labelled.writes + labelled.reads
                result[labelled.call.module] += [label for tensor in tensors for label in tensor.labels]
        running |= result.keys()
        for (tensor, _), slots in self.coupling.slots.items():
            parts = tensor.split(".")
            for name in [".".join(parts[:end]) for end in range(1, len(parts))]:
                if name not in running:
                    result[name].append(slots)
        return result

    def widths_taken_as_equal(self, kind: type, op: str) -> list[tuple[Tensor, Tensor]]:
        """Pairs of labels, of as many entries each, that the code may take to be of equal width where modules of one class call
        an operator: the equal parts of a split; the result of a reshape and the module's input, as in
        `B, N, C = x.shape; …; y.reshape(B, N, C)`. Heads have none."""
        modules = dict(self.net.named_modules())
        in_heads = self.roots[torch.cat([*self.heads().values(), torch.zeros(0, dtype=torch.long)])]
        result: list[tuple[Tensor, Tensor]] = []
        for propagation in self.propagations.values():
            given: dict[str, list[Tensor]] = defaultdict(list)
            for name, index in propagation.graph.module_inputs:
                given[name] += propagation.tensors[index].labels
            for labelled in propagation.calls:
                if op_name(labelled.call.op) != op or type(modules[labelled.call.module]) is not kind:
                    continue
                written = [label for tensor in labelled.writes for label in tensor.labels]
                partners = written if len(labelled.writes) > 1 else given[labelled.call.module]
                for one, other in product(written, partners):
                    if one is not other and len(varying_dims(one)) == len(varying_dims(other)) == 1:
                        result.append((one.flatten(), other.flatten()))
        return [
            (one, other)
            for one, other in result
            if len(one) == len(other)
            and not torch.equal(self.roots[one], self.roots[other])
            and not bool(self.frozen[torch.cat([one, other])].any())
            and not bool(torch.isin(self.roots[torch.cat([one, other])], in_heads).any())
        ]

    def heads_taken_as_equal(self, roots: Tensor, module: str) -> list[tuple[Tensor, Tensor]]:
        """The heads of these groups and those of a module, as a pair, where the code may take their numbers to be equal: T5's
        cross-attention creates a mask of zeros in its first layer and adds it in all of them."""
        heads = self.heads()
        other = heads.pop(module, None)
        if other is None or bool(torch.isin(self.roots[other], roots).any()):
            return []
        mine = [slots for slots in heads.values() if bool(torch.isin(self.roots[slots], roots).any())]
        return [(slots, other) for slots in mine[:1] if len(slots) == len(other)]

    def _roots_with_several_rows(self) -> set[int]:
        result: set[int] = set()
        for propagation in self.propagations.values():
            for rows in [rows for found in propagation.rows.values() for rows in found]:
                roots, counts = self.roots[rows].unique(return_counts=True)
                result |= set(roots[counts > 1].tolist())
        return result - {FROZEN}

    def layer_rows(self) -> dict[str, Tensor]:
        """Layer → the slots of its rows.

        Layers are linear layers and convolutions, whether their own forward or a surrounding module's uses their weight, and
        any other module without children that multiplies with exactly one weight of its own.
        """
        result: dict[str, Tensor] = {}
        for name, module in self.net.named_modules():
            found = [rows for propagation in self.propagations.values() for rows in propagation.rows.get(name, [])]
            standard = isinstance(module, nn.Linear | _ConvNd)
            single = not any(True for _ in module.children()) and all(torch.equal(rows, found[0]) for rows in found)
            if standard:
                slots = self._weight_rows(name, module)
                own = [rows for rows in found if slots is not None and torch.equal(rows, slots)]
                rows = next(iter([*own, *found[-1:]]), slots)  # it may multiply with others before: x·Aᵀ·Bᵀ + x·Wᵀ
                if rows is not None:
                    result[name] = rows
            elif found and single:
                result[name] = found[0]
        return result

    def _weight_rows(self, name: str, module: nn.Module) -> Tensor | None:
        """The slots of the rows of a layer's weight parameter."""
        dim = 1 if getattr(module, "transposed", False) else 0
        keys = [(f"{name}.{weight}".removeprefix("."), dim) for weight in WEIGHT_NAMES]
        return next((self.coupling.slots[key] for key in keys if key in self.coupling.slots), None)

    def propagate(self, inputs: Inputs, *, loss_needs_training_mode: bool = False) -> LabelPropagation:
        """Label propagation through the forward pass of these inputs in evaluation mode, or, with `loss_needs_training_mode`,
        in training mode with norms and dropout in evaluation mode. PathError if it couples or freezes more than the traced
        passes do."""
        attributes = self._stated_widths(torch.ones(len(self.coupling), dtype=torch.bool))
        real = inputs is not self.inputs
        return self._propagate(
            self._trace_forward(
                inputs,
                loss_needs_training_mode,
                attributes,
                loss_needs_training_mode=loss_needs_training_mode,
                shapes=self.shapes,
                compute_inputs=real,
            )
        )

    def _propagate(self, graph: Graph) -> LabelPropagation:
        """Label propagation through another path. PathError if it couples or freezes more than the traced passes do."""
        if graph.error is not None and graph.stop is None:
            raise PathError(graph.error_module, first_line(graph.error)) from graph.error
        neurons = torch.cat([*self.neuron_slots().values(), torch.zeros(0, dtype=torch.long)])
        coupling = ReadOnlyCoupling(self.coupling, set(self.roots[neurons].tolist()))
        propagation = self._propagation(graph, coupling)
        try:
            self._run(propagation)
            _make_rectangular(coupling, propagation)
        except NewCouplingError as error:
            module = propagation.call.module if propagation.calls else ""
            raise PathError(module, f"it couples or freezes more neurons than the traced path: {error}") from error
        return propagation

    def trace_now(self, inputs: Inputs, *, loss_needs_training_mode: bool) -> Graph:
        """The forward pass of these inputs, as `propagate` traces it, through the network with the neurons that remain."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors_of(self.net).items()}
        return self._trace_forward(
            inputs,
            loss_needs_training_mode,
            loss_needs_training_mode=loss_needs_training_mode,
            shapes=shapes,
            compute_inputs=inputs is not self.inputs,
        )

    def update(self, resized: Mapping[str, Shape]) -> None:
        """Traces the network again if a value that its code reads has changed, or these buffers have other shapes. PathError if
        more neurons are coupled or frozen then."""
        reads = [item for propagation in self.propagations.values() for item in propagation.graph.read_values.items()]
        tensors = tensors_of(self.net) if reads else {}
        same = all(_equal(tensors[name] if read.source is None else read.source, read.value) for name, read in reads)
        if same and not resized:
            return
        before = self.shapes, self.coupling.slots
        self.shapes = self.shapes | dict(resized)
        self.coupling.slots = {key: slots for key, slots in self.coupling.slots.items() if key[0] not in resized}
        attributes = self._stated_widths(torch.ones(len(self.coupling), dtype=torch.bool))
        try:
            self.replace_traces(
                {
                    training: self._trace_forward(self.inputs, training, attributes, shapes=self.shapes)
                    for training in self.propagations
                }
            )
        except PathError:
            self.shapes, self.coupling.slots = before
            raise

    def replace_traces(self, graphs: Mapping[bool, Graph]) -> None:
        """Takes new traces of the full-size network. PathError if more neurons are coupled or frozen in them."""
        self.propagations |= {training: self._propagate(graph) for training, graph in graphs.items()}

    # Cuts. `alive` is a mask over all slots

    def shapes_after(self, alive: Tensor) -> dict[str, Shape]:
        """The shapes that a cut changes."""
        after = {name: list(shape) for name, shape in self.shapes.items()}
        for (name, dim), size in self.sizes_after(alive).items():
            after[name][dim] = size
        return {name: tuple(shape) for name, shape in after.items() if tuple(shape) != self.shapes[name]}

    def sizes_after(self, alive: Tensor) -> dict[tuple[str, int], int]:
        """(name, dim) → how many of its slots remain."""
        slots = self.coupling.slots
        ends = torch.tensor([0, *map(len, slots.values())]).cumsum(0)
        remaining = torch.cat([ends[:1], alive[torch.cat([ends[:0], *slots.values()])].cumsum(0)])[ends]
        return dict(zip(slots, remaining.diff().tolist(), strict=True))

    def widths_after(self, alive: Tensor) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
        """(name, module, attributes) for every module, with the attributes that state widths."""
        after = self.shapes_after(alive)
        first_inputs: dict[str, LabelledTensor] = {}
        groups: dict[str, int] = {}
        for propagation in self.propagations.values():
            first_inputs |= {name: propagation.tensors[index] for name, index in propagation.graph.module_inputs}
            groups |= {name: int(alive[label].sum()) for name, label in propagation.groups.items()}
        first = {id(tensor): name for name, tensor in tensors_of(self.net).items()}
        every_name = [
            *self.net.named_parameters(remove_duplicate=False),
            *self.net.named_buffers(remove_duplicate=False),
        ]
        known = self.shapes | after
        shapes = {name: known.get(first[id(tensor)], tuple(tensor.shape)) for name, tensor in every_name}
        for name, module in self.net.named_modules():

            def shape(key: str, name: str = name) -> Shape | None:
                return shapes.get(f"{name}.{key}".removeprefix("."))

            def input_shape(name: str = name) -> Shape:
                return shape_after(first_inputs[name], alive) if name in first_inputs else ()

            counts = {key: int(alive[slots].sum()) for key, slots in self.attributes.get(name, {}).items()}
            widths = stated_widths(module, shape, input_shape, groups.get(name))
            yield name, module, widths | with_integers(module, counts)

    def check_counts(self, alive: Tensor) -> None:
        """InputError if a number of groups or heads, which a removal sets, is not the one that these slots leave."""
        for name, module, stated in self.widths_after(alive):
            for key in {"num_groups", *self.attributes.get(name, ())} & stated.keys():
                if (value := getattr(module, key)) != stated[key]:
                    raise InputError(
                        f"{name}.{key} must be {stated[key]}, got {value}; the network changed after Neurons was created: "
                        "create it again"
                    )

    def removal(self, before: Tensor, after: Tensor) -> Removal:
        """What a removal changes, from one mask of remaining slots to the next, in positions before it."""
        slices: dict[str, dict[int, Tensor]] = defaultdict(dict)
        sizes = self.sizes_after(after)
        for (name, dim), size in self.sizes_after(before).items():
            if sizes[name, dim] < size:
                slots = self.coupling.slots[name, dim]
                slices[name][dim] = after[slots[before[slots]]].nonzero().squeeze(1)
        widths = {}
        for name, module, stated in self.widths_after(after):
            changed = {attribute: value for attribute, value in stated.items() if getattr(module, attribute) != value}
            if changed:
                widths[name] = changed
        return Removal(dict(slices), widths)

    def trace_cut(self, alive: Tensor) -> Iterator[tuple[LabelPropagation, bool, Graph]]:
        """The network's own code traced at the shapes after a cut: (label propagation of the whole network, mode, graph)."""
        shapes = self.shapes | self.shapes_after(alive)
        attributes = self._stated_widths(alive)
        for training, propagation in self.propagations.items():
            graph = self._trace_forward(self.inputs, training, attributes, shapes=shapes)
            yield propagation, training, graph

    def _stated_widths(self, alive: Tensor) -> list[Attributes]:
        """The attributes that state widths after a cut."""
        return [(module, widths) for _, module, widths in self.widths_after(alive) if widths]

    def macs(self, alive: Tensor) -> int:
        """Multiply–accumulates of convolutions, matrix products and recurrent layers in one evaluation-mode forward pass of the
        example input."""
        calls = [each for each in self.propagations[False].calls if op_name(each.call.op) in PRODUCT_NAMES]
        return self.untraced_macs + sum(_macs(labelled, alive) for labelled in calls)

    def measure_untraced(self) -> None:
        """Where tracing has stopped, counts the MACs after that point by a forward pass on the example input, of the network at
        its full size. What the code uses there is frozen, so that no cut changes them."""
        graph, outputs = self.propagations[False].graph, self.outputs
        if graph.stop is None and graph.error is None:
            return
        forward: Callable[..., Any] = self.net
        if outputs is not None and outputs.replaces_forward:
            forward = partial(outputs.function, *(() if outputs.is_method else (self.net,)))
        with suppress(Exception):  # whatever the network's code raises on data; the trial says so
            whole = measured_macs(self.net, forward, self.inputs_beside_network())
            self.untraced_macs = max(0, whole - self.macs(torch.ones(len(self.coupling), dtype=torch.bool)))


def _one_period(slots: Tensor) -> Tensor:
    """Slots without repetitions of all of them in the same order, such as those of heads for every sample of a batch."""
    starts = (slots == slots[0]).nonzero().flatten().tolist()
    repeated = len(starts) > 1 and starts[1] > 1 and torch.equal(slots[: -starts[1]], slots[starts[1] :])
    return slots[: starts[1]] if repeated else slots


def _make_rectangular(coupling: Coupling, *propagations: LabelPropagation) -> None:
    """Couples slots so that every tensor loses whole slices. Where a label varies along several dimensions, as after splitting
    channels into groups, the same position is removed from every group: code often fixes the number of groups, rarely their
    size."""
    labels = {
        id(label): label
        for propagation in propagations
        for tensor in propagation.tensors
        for label in tensor.labels
        if len(varying_dims(label)) > 1
    }
    changed = bool(labels)
    while changed:
        changed = False
        for label in labels.values():  # in the order of the forward pass: a split comes before its consumers
            roots = compact(coupling.roots_of(label))
            for dim in varying_dims(roots)[:-1]:
                first = roots.narrow(dim, 0, 1)
                coupling.union(first, roots, "its channels are laid out in a way that cannot be cut")
                roots, changed = first, True


def _macs(labelled: LabelledCall, alive: Tensor) -> int:
    reads, writes = ([shape_after(tensor, alive) for tensor in each] for each in (labelled.reads, labelled.writes))
    return macs_of(op_name(labelled.call.op), labelled.call.args, reads, writes)
