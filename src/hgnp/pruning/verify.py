"""Verification of cuts: the network's own code, traced at the smaller shapes, must do what label propagation predicts.

Every operator call must be the one it was, with the same constants, and its result must be the old result without the removed
entries, in the old order. A hard-coded `view`, a fixed split point or a constant that depends on the width is caught here.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, islice
from typing import Any

import torch
from torch import Tensor, nn

from hgnp.errors import InputError, first_line
from hgnp.pruning.graph import Graph, OpCall, Value, leaves_of
from hgnp.pruning.labels import LabelledTensor, keep, keep_masks, shape_after, varying_dims, without_repetition
from hgnp.pruning.propagation import LabelledCall, LabelPropagation
from hgnp.pruning.rules import (
    PRESERVES_FILLER,
    PRODUCTS,
    RESHAPES,
    filler,
    independent_dims,
    op_name,
    permutes_dims,
    rearrangement,
    resolved_sizes,
    rule_for,
)
from hgnp.pruning.structure import PathError, Structure, TracedForward

ANOTHER_PATH = "the smaller network takes another path through its code"
TAKES_SIZES = (
    *RESHAPES,
    "expand",
    "repeat",
    "native_group_norm",
    "native_layer_norm",
    "_fused_rms_norm",
)
"""Operators among whose arguments are sizes, which may change with the width."""
LAYOUT = ("clone", "contiguous", "alias", "detach", "mm", "bmm", "addmm", "baddbmm", "mv", "add", "add_")
"""Operators that PyTorch adds, drops or merges depending on the memory layout."""
MAX_ATTRIBUTE_TRIALS = 24
Root = int
RootClass = tuple[Root, ...]
"""Roots whose slots lie in the same dimensions of the same tensors: a cut that works for one works for all."""


@dataclass(frozen=True)
class Mismatch:
    """Why a cut does not work."""

    problem: str
    op: str
    """The operator at whose call it fails."""
    module: str
    """The module that calls it."""
    slots: Tensor
    """The removed slots there."""
    position: int
    """How many operator calls before it are as they should be."""

    @property
    def reason(self) -> str:
        return f"{self.problem} ({self.op}{f' in {self.module}' if self.module else ''})"


class CutVerifier:
    """Verifies cuts of a network. `aligned=False` compares shapes alone, for cuts that combine different channels by
    design (`branch_coupling.py`)."""

    def __init__(self, structure: Structure, *, aligned: bool = True) -> None:
        self._structure, self._aligned = structure, aligned
        self._adapted: set[tuple[type, str]] = set()
        self._failures: dict[RootClass, Mismatch] = {}
        """Classes that nothing helped, by themselves."""
        self.verified: tuple[Tensor, TracedForward] | None = None
        self._verified_settings: Any = None
        """The last cut that was found to work, and its trace."""
        self.caches: dict[str, dict[str, Any]] = {}
        """Module → attributes that the code has set at the shapes of a cut that failed, and not at the network's own: it keeps
        something that depends on shapes."""

    def is_verified(self, alive: Tensor) -> bool:
        """Whether this is the last cut that was found to work, and the network's settings have not changed since."""
        if self.verified is None or not torch.equal(self.verified[0], alive):
            return False
        return bool(self._verified_settings == _settings(self._structure.net))

    def after_removal(self) -> None:
        """Call it once the verified cut has been made: it changes the modules' widths, and so their settings."""
        self._verified_settings = _settings(self._structure.net)

    def mismatch(self, alive: Tensor) -> Mismatch | None:
        """Traces the network's own code at the smaller shapes. None if every operator call gives what it should."""
        problem = self._check(alive, lambda before, graph: _compare(before, graph, alive, self._aligned))
        if problem is None:
            return None
        # PyTorch takes other paths (fewer copies) where a width is 1. There the cut is checked with a width of 2, and with a
        # width of 1 the code must run, call the same operators and return outputs of the same shapes.
        wider = self._at_least_two(alive)
        slots_of = [*self._structure.heads().values(), *self._structure.coupling.slots.values()]
        if any(bool(wider[slots].all()) and not bool(alive[slots].all()) for slots in slots_of):
            return problem  # of two heads or groups one is left, and no cut of them is checked: code may still make two of it
        if torch.equal(wider, alive) or self._check(
            wider, lambda before, graph: _compare(before, graph, wider, self._aligned)
        ):
            return problem
        return self._check(alive, lambda before, graph: None if _same_operators(before, graph, alive) else problem)

    def retrace_if_changed(self) -> bool:
        """Traces the full-size network again if it no longer does what its trace says, as after a change of a dropout's rate or
        a hook that was added; returns whether it did. InputError if more neurons are coupled or frozen in the new trace."""
        everything = torch.ones(len(self._structure.coupling), dtype=torch.bool)
        traces = list(self._structure.trace_cut(everything))
        if all(_compare(before, graph, everything, self._aligned) is None for before, _, graph in traces):
            return False
        try:
            self._structure.replace_traces({training: graph for _, training, graph in traces})
        except PathError as error:
            raise InputError(
                f"net must couple and freeze no more neurons than when Neurons was created, got a change in {error.where} "
                f"({error.reason}); create Neurons after the change, or change it before the run"
            ) from error
        self.verified = None
        return True

    def _check(self, alive: Tensor, compare: Callable[[LabelPropagation, Graph], Mismatch | None]) -> Mismatch | None:
        graphs = {}
        for before, training, graph in self._structure.trace_cut(alive):
            graphs[training] = graph
            problem = compare(before, graph)
            if problem is not None:
                for module, written in graph.written.items():
                    new = {key: value for key, value in written.items() if key not in before.graph.written[module]}
                    if new:
                        self.caches.setdefault(module, {}).update(new)
                return problem
        self._verified_settings = _settings(self._structure.net)
        self.verified = alive, replace(self._structure.traced, graphs=graphs, head_labels=None)
        return None

    def _at_least_two(self, alive: Tensor) -> Tensor:
        """The cut with a group restored wherever a tensor was left with one entry along a dimension."""
        alive, roots = alive.clone(), self._structure.roots
        tensors = [tensor for before in self._structure.propagations.values() for tensor in before.tensors]
        for label in {id(label): label for tensor in tensors for label in tensor.labels}.values():
            left = alive[label]
            for dim in varying_dims(label):
                remains = left.transpose(0, dim).reshape(label.shape[dim], -1).any(1)
                if int(remains.sum()) == 1:
                    removed = label.transpose(0, dim)[~remains].flatten()[0]
                    alive[roots == roots[removed]] = True
                    left = alive[label]
        return alive

    # Before a neuron is called prunable

    def freeze_unprunable(self, neurons: Tensor) -> None:
        """Tries a cut of every class of groups that contains a neuron, and freezes those that fail. `neurons` are the slots of
        all neurons."""
        structure = self._structure
        self._freeze_single_groups()
        structure.update_roots()
        classes = self._root_classes(neurons)
        suspects: list[RootClass] = []
        while classes:
            alive, tried = self._sample(classes)
            problem = self.mismatch(alive)
            if self.caches and not structure.caches:
                return  # the network must be traced again, with what it keeps
            if problem is None:
                suspects += [found for found in classes if found not in tried]
                break
            roots = set(structure.roots[problem.slots].tolist())
            blamed = [found for found in tried if roots & set(found)] or tried
            frozen = self._adapt(problem, blamed, classes)
            if frozen is None:
                done = set(structure.roots[[root for found in suspects for root in found]].tolist())
                suspects = [tuple(structure.roots[list(found)].unique().tolist()) for found in suspects]
                classes = [found for found in self._root_classes(neurons) if not done & set(found)]
                continue
            suspects += [found for found in blamed if found not in frozen]
            classes = [found for found in classes if found not in (*blamed, *frozen)]
        for suspect in suspects:
            alive, tried = self._sample([suspect])
            problem = (self._failures.get(suspect) or self.mismatch(alive)) if tried else None
            if problem is not None:
                structure.coupling.freeze(torch.tensor(suspect), problem.reason)
        structure.update_roots()

    def sample_cut(self, neurons: Tensor) -> Tensor:
        """A cut of every class of groups that contains a neuron; groups that would empty a tensor together are left out."""
        return self._sample(self._root_classes(neurons))[0]

    def _adapt(self, problem: Mismatch, blamed: list[RootClass], classes: list[RootClass]) -> list[RootClass] | None:
        """Finds what a cut needs that fails: the fewest integer attributes, such as a number of heads or the width of a split,
        that change with it in every module of the same class; and widths that the code takes to be equal.

        None if that was found; otherwise the classes that are frozen, as nothing helps: modules of one class fail alike.
        """
        structure = self._structure
        modules, heads = dict(structure.net.named_modules()), structure.heads()
        module_of = {root: name for name, slots in heads.items() for root in structure.roots[slots].tolist()}
        mine = next((found for found in blamed if found[0] in module_of), None)
        if mine is None:
            kind, alike, mine = (type(modules[problem.module]), problem.op), classes, blamed[0]
        else:
            kind = type(modules[module_of[mine[0]]]), ""
            alike = [found for found in classes if found[0] in module_of]
            alike = [found for found in alike if type(modules[module_of[found[0]]]) is kind[0]]
        if kind in self._adapted or not self._sample([mine])[1]:
            return []
        self._adapted.add(kind)
        before = structure.coupling.snapshot(), structure.equal_widths, structure.attributes
        failure = self._find_adaptation(mine, alike, of_heads=not kind[1])
        if failure is None:
            return None
        structure.coupling.restore(before[0])
        structure.equal_widths, structure.attributes = before[1:]
        structure.update_roots()
        self._failures[mine] = failure
        if not kind[1]:
            for found in alike:
                own = failure.module == module_of[mine[0]]
                mismatch = replace(failure, module=module_of[found[0]] if own else failure.module)
                structure.coupling.freeze(torch.tensor(found), mismatch.reason)
        return [] if kind[1] else alike

    def _find_adaptation(self, mine: RootClass, alike: list[RootClass], *, of_heads: bool) -> Mismatch | None:
        """Adapts attributes and couples equal widths, step by step, until a cut of `mine` works; each step must lead further
        into the forward pass. Otherwise the mismatch that comes last in it, with all that helped: what the code cannot do."""
        structure = self._structure
        modules = dict(structure.net.named_modules())
        roots, every_root = torch.tensor(mine), torch.tensor([root for found in alike for root in found])
        alive = self._sample([mine])[0]
        problem = self.mismatch(alive)
        while problem is not None:
            kind = type(modules[problem.module])
            if of_heads:
                pairs = structure.heads_taken_as_equal(structure.roots[roots], problem.module)
            else:
                pairs = structure.widths_taken_as_equal(kind, problem.op)
            if pairs:
                structure.unite(pairs)
                found = tuple(structure.roots[roots].unique().tolist())
                if bool(structure.frozen[list(found)].any()) or not (sample := self._sample([found]))[1]:
                    return problem
                alive = sample[0]
            own = structure.counting_attributes(structure.roots[roots])
            names = {(type(modules[name]), key) for name in own for key in own[name]}
            caller = type(modules[problem.module.rpartition(".")[0]])  # it may have created what does not fit
            names = {name for name in names if of_heads or name[0] in (kind, caller)}
            counting = structure.counting_attributes(structure.roots[every_root])
            before, best, best_attributes = structure.attributes, problem, structure.attributes
            subsets = _subsets(sorted(names, key=_qualified))
            for chosen in islice(subsets, 0 if pairs else 1, MAX_ATTRIBUTE_TRIALS):  # without either it has failed
                structure.attributes = {
                    name: before.get(name, {})
                    | {key: slots for key, slots in counting.get(name, {}).items() if (type(module), key) in chosen}
                    for name, module in modules.items()
                }
                mismatch = self.mismatch(alive)
                if mismatch is None:
                    return None
                if mismatch.position > best.position:
                    best, best_attributes = mismatch, structure.attributes
            structure.attributes = best_attributes
            if best is problem:
                return problem
            problem = best
        return None

    def _freeze_single_groups(self) -> None:
        """Freezes groups that are all of a tensor's dimension: removing one would leave nothing of the tensor."""
        coupling = self._structure.coupling
        roots = coupling.roots()
        for (name, _), slots in coupling.slots.items():
            if len(roots[slots].unique()) == 1:
                coupling.freeze(slots[:1], f"all of {name} is one coupled group")
        self._structure.update_roots()
        for found in self._structure.all_of_a_tensor:
            if len(found) == 1:  # a part of a layer's output
                coupling.freeze(found, "all of a tensor is one coupled group")

    def _root_classes(self, neurons: Tensor) -> list[RootClass]:
        structure = self._structure
        candidates = set(structure.roots[neurons].tolist()) - set(structure.roots[structure.frozen].tolist())
        dimensions: dict[Root, list[int]] = defaultdict(list)
        for index, slots in enumerate(structure.coupling.slots.values()):
            for root in structure.roots[slots].unique().tolist():
                if root in candidates:
                    dimensions[root].append(index)
        classes: dict[tuple[int, ...], list[Root]] = defaultdict(list)
        for root in sorted(candidates):
            classes[tuple(dimensions[root])].append(root)
        return [tuple(found) for found in classes.values()]

    def _sample(self, classes: list[RootClass]) -> tuple[Tensor, list[RootClass]]:
        """A cut that removes something of every class and leaves something of every tensor; and the classes it cuts."""
        structure = self._structure
        generator = torch.Generator().manual_seed(len(classes))
        tried = list(classes)
        while True:
            removed = torch.zeros(len(structure.coupling), dtype=torch.bool)
            for roots in tried:
                # a third, so that code which needs a multiple of two or three fails
                count = max(1, len(roots) // 3)
                order = torch.randperm(len(roots), generator=generator)[:count]
                removed[torch.tensor(roots)[order]] = True
            emptying = structure.emptying(removed)
            if not emptying:
                return ~removed[structure.roots], tried
            # classes that empty a tensor together are tried one by one
            tried = [roots for roots in tried if not emptying & set(roots)]


def _qualified(name: tuple[type, str]) -> tuple[str, str]:
    return name[0].__qualname__, name[1]


def _subsets(names: list[tuple[type, str]]) -> Iterator[tuple[tuple[type, str], ...]]:
    """The subsets of some names, small ones first."""
    return chain.from_iterable(combinations(names, size) for size in range(len(names) + 1))


def _compare(before: LabelPropagation, graph: Graph, alive: Tensor, aligned: bool) -> Mismatch | None:
    expected = [labelled for labelled in before.calls if not _copies(labelled.call)]
    calls = [call for call in graph.op_calls if not _copies(call)]
    old, new = _ValueNumbers(before.graph.op_calls), _ValueNumbers(graph.op_calls)
    for position, (labelled, call) in enumerate(zip(expected, calls, strict=False)):
        problem = _difference(before, labelled, call, graph, alive, aligned)
        if problem is None and old.of(labelled.call) != new.of(call):
            problem = ANOTHER_PATH
        if problem is not None:
            return _mismatch(labelled, alive, problem, position)
    if graph.error is not None and not _stops_alike(before.graph, graph):
        last = expected[min(len(calls), len(expected) - 1)]
        return _mismatch(last, alive, f"the network's code fails: {first_line(graph.error)}", len(calls))
    same_outputs = old.returned(before.graph) == new.returned(graph)
    if expected and (len(calls) != len(expected) or not same_outputs):
        return _mismatch(expected[-1], alive, ANOTHER_PATH, len(expected))
    return None


def _settings(net: nn.Module) -> list[Any]:
    """The modules with their numbers, texts and hooks; of other attributes which object they are."""
    return [
        (
            id(module), list(module._forward_hooks), list(module._forward_pre_hooks),
            {name: value if isinstance(value, bool | int | float | str) else id(value)
             for name, value in vars(module).items() if name != "training"},
        )
        for module in net.modules()
    ]  # fmt: skip


def _stops_alike(before: Graph, graph: Graph) -> bool:
    """Whether tracing stopped at the same operator."""
    return before.stop is not None and graph.stop is not None and before.stop[1:] == graph.stop[1:]


def _copies(call: OpCall) -> bool:
    """Whether a call copies a tensor. PyTorch does so where the memory layout requires it, which may change with a width."""
    return op_name(call.op) in ("clone", "contiguous")


class _ValueNumbers:
    """Numbers values in the order in which they appear; a tensor and its copies have one number."""

    def __init__(self, calls: list[OpCall]) -> None:
        self._original: dict[int, int] = {}
        for call in calls:
            if _copies(call):
                self._original[call.writes[0]] = self._original.get(call.reads[0], call.reads[0])
        self._number: dict[int, int] = {}

    def of(self, call: OpCall) -> list[int]:
        return self._of(call.reads + call.writes)

    def returned(self, graph: Graph) -> tuple[list[int], list[int]]:
        """Those that the network returns, and those of them that are left out; after all calls."""
        return self._of(graph.outputs), self._of(graph.left_out)

    def _of(self, indices: tuple[int, ...]) -> list[int]:
        values = [self._original.get(index, index) for index in indices]
        return [self._number.setdefault(value, len(self._number)) for value in values]


def _difference(
    before: LabelPropagation, labelled: LabelledCall, call: OpCall, graph: Graph, alive: Tensor, aligned: bool
) -> str | None:
    """How a call differs from the expected one, or None."""
    old, values = labelled.call, before.graph.values
    if _operator(call) != _operator(old) or len(call.reads) != len(old.reads) or len(call.writes) != len(old.writes):
        return ANOTHER_PATH
    if [values[index].name for index in old.reads] != [graph.values[index].name for index in call.reads]:
        return ANOTHER_PATH  # of other weights
    problem = _other_shape(labelled, call, graph, alive)
    if problem is not None:
        return problem
    reads = [graph.values[index] for index in call.reads]
    constants = zip((values[index] for index in old.reads), reads, strict=True)
    if op_name(call.op) == "native_group_norm":
        groups = before.groups.get(call.module)
        if call.args[6] != (old.args[6] if groups is None else int(alive[groups].sum())):
            return "the network's code fixes its number of groups"
    same_arguments = call.args == old.args and call.kwargs == old.kwargs  # and so the same numbers
    if (
        (not same_arguments and _width_independent(call, labelled) != _width_independent(old, labelled))
        or not all(_same_constant(one, other) for one, other in constants)
        or _sums_filler(labelled, reads)
    ):
        return "a number in the network's code depends on the width"
    moves = rearrangement(old.op) is not None and not permutes_dims(old.op)
    if aligned and moves and not _all_alive(labelled.reads[0], alive):
        return _misplaced(labelled, call, graph, alive)
    return None


def _other_shape(labelled: LabelledCall, call: OpCall, graph: Graph, alive: Tensor) -> str | None:
    """How the shapes of a call's results differ from those that the labels give, or None."""
    for tensor, index in zip(labelled.writes, call.writes, strict=True):
        if tensor.byproduct or tensor.filler:
            continue
        try:
            expected = shape_after(tensor, alive)
        except ValueError as error:
            return str(error)
        shape = graph.values[index].shape
        if len(shape) != len(expected) or any(
            size != wanted and not tensor.resizable(dim)
            for dim, (size, wanted) in enumerate(zip(shape, expected, strict=True))
        ):
            return f"the network's code fixes a size: expected shape {expected}, got {shape}"
    return None


def _operator(call: OpCall) -> str:
    return "view" if op_name(call.op) in RESHAPES else str(call.op)


def _misplaced(labelled: LabelledCall, call: OpCall, graph: Graph, alive: Tensor) -> str | None:
    """Whether the smaller tensor's entries move to where the larger one's moved."""
    source, rearranged = labelled.reads[0], rearrangement(call.op)
    assert rearranged is not None
    shape = graph.values[call.reads[0]].shape
    masks, labels = keep_masks(source, alive), list(source.labels)
    if any(label.numel() > len(label.unique()) for label in labels):  # entries of a head share a label: number them
        labels.append(_numbered(source, labelled.call, call, shape))
    for label in labels:
        smaller = rearranged(keep(label, masks).expand(shape), call.args[1:], call.kwargs)
        larger = rearranged(label.expand(source.shape), labelled.call.args[1:], labelled.call.kwargs)
        for tensor, index, left, whole in zip(labelled.writes, call.writes, smaller, larger, strict=True):
            expected = keep(without_repetition(whole), keep_masks(tensor, alive))
            if not _broadcast_alike(without_repetition(left), expected, graph.values[index].shape):
                return "the network's code moves its channels elsewhere when there are fewer"
    return None


def _numbered(source: LabelledTensor, call: OpCall, smaller: OpCall, shape: tuple[int, ...]) -> Tensor:
    """The number of every entry. Along dimensions without labels that both reshapes, of this tensor and of the smaller one of
    this shape, treat by themselves, there is one number."""
    sizes = list(source.shape)
    if op_name(call.op) in RESHAPES:
        groups = independent_dims(source.shape, resolved_sizes(source.shape, call.args[1]))
        if groups == independent_dims(shape, resolved_sizes(shape, smaller.args[1])):
            for dims, _ in groups:
                if all(source.along(dim) is None for dim in dims):
                    for dim in dims:
                        sizes[dim] = 1
    return torch.arange(math.prod(sizes)).reshape(sizes)


def _broadcast_alike(one: Tensor, other: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether two labels of a tensor of this shape are the same."""
    if one.shape == other.shape:
        return torch.equal(one, other)
    try:
        return torch.equal(one.expand(shape), other.expand(shape))
    except RuntimeError:  # sizes that do not fit
        return False


def _same_operators(before: LabelPropagation, graph: Graph, alive: Tensor) -> bool:
    """Whether two forward passes call the same operators, with results of the right shapes, apart from those that depend on the
    memory layout."""

    def is_compared(call: OpCall) -> bool:
        return rearrangement(call.op) is None and op_name(call.op) not in LAYOUT

    expected = [labelled for labelled in before.calls if is_compared(labelled.call)]
    calls = [call for call in graph.op_calls if is_compared(call)]
    outputs = [shape_after(before.tensors[index], alive) for index in before.graph.outputs]
    return (
        (graph.error is None or _stops_alike(before.graph, graph))
        and [op_name(labelled.call.op) for labelled in expected] == [op_name(call.op) for call in calls]
        and not any(_other_shape(one, other, graph, alive) for one, other in zip(expected, calls, strict=True))
        and outputs == [graph.values[index].shape for index in graph.outputs]
    )


def _all_alive(tensor: LabelledTensor, alive: Tensor) -> bool:
    return all(bool(alive[label].all()) for label in tensor.labels)


def _width_independent(call: OpCall, labelled: LabelledCall) -> list[int | float]:
    """The numbers among a call's arguments that must not change with the width; sizes may."""
    name = op_name(call.op)
    args: Sequence[Any] = call.args
    if name in ("full", "new_full", "full_like", "fill", "fill_", "scalar_tensor"):
        args = args[-1:]
    elif name in ("slice", "select", "split", "split_with_sizes"):
        position = 2 if name.startswith("split") else 1
        dim = args[position] if len(args) > position else 0
        args = args if labelled.reads[0].along(dim) is None else []
    elif name == "convolution":
        args = args[3:8]
    elif name == "constant_pad_nd":  # from the last dimension on, before and after
        ndim = len(labelled.reads[0].shape)
        args = [
            amount for number, amount in enumerate(args[1]) if labelled.reads[0].along(ndim - 1 - number // 2) is None
        ]
    elif name in TAKES_SIZES or rule_for(call.op) is filler:
        args = []
    return [leaf for leaf in leaves_of((args, call.kwargs)) if isinstance(leaf, int | float)]


def _sums_filler(labelled: LabelledCall, reads: list[Value]) -> bool:
    """Whether a call's result depends on the width of a filler, which has another one now. A product with zeros is zero."""
    rule = rule_for(labelled.call.op)
    return rule not in (*PRESERVES_FILLER, filler) and any(
        _resized(tensor, value) and not (tensor.zero and rule in PRODUCTS)
        for tensor, value in zip(labelled.reads, reads, strict=True)
    )


def _resized(tensor: LabelledTensor, value: Value) -> bool:
    """Whether a tensor that fits any width has another width now."""
    return any(
        size != old and (tensor.filler or tensor.resizable(dim))
        for dim, (old, size) in enumerate(zip(tensor.shape, value.shape, strict=False))
    )


def _same_constant(one: Value, other: Value) -> bool:
    if one.constant is other.constant or one.constant is None or other.constant is None:
        return one.constant is other.constant
    return one.constant.shape == other.constant.shape and torch.equal(one.constant, other.constant)


def _mismatch(labelled: LabelledCall, alive: Tensor, problem: str, position: int) -> Mismatch:
    labels = [label.reshape(-1) for tensor in labelled.reads + labelled.writes for label in tensor.labels]
    slots = torch.unique(torch.cat(labels)) if labels else torch.zeros(0, dtype=torch.long)
    return Mismatch(problem, op_name(labelled.call.op), labelled.call.module, slots[~alive[slots]], position)
