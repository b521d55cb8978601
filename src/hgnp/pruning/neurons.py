"""`Neurons`: the neurons of a network, their coupling, and their removal."""

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from hgnp.errors import InputError, did_you_mean, refuse_renamed
from hgnp.pruning.branch_coupling import BranchCoupling, least_paper, tiers_of
from hgnp.pruning.config import update_config
from hgnp.pruning.gates import Gates, find_gates
from hgnp.pruning.graph import spec_of, tensors_of
from hgnp.pruning.limits import limit_by_layer
from hgnp.pruning.selection import (
    CouplingMode,
    Scores,
    Selection,
    Unit,
    Values,
    as_count,
    as_values,
    check_coupling,
    coupling_of,
    floors_of,
    is_rounded,
    least_coupled,
    room_of,
    rounded_groups,
)
from hgnp.pruning.state import PruningState
from hgnp.pruning.structure import PathError, Structure, TracedForward, depends_on_data
from hgnp.pruning.summary import Frozen, Layer, Preview, table
from hgnp.pruning.surgery import Change, changes_to_net, changes_to_optimizer, check_copies, check_optimizer, commit
from hgnp.pruning.trial import disagreement
from hgnp.pruning.validation import as_inputs, as_outputs, check_prunable, check_samples, protected_modules
from hgnp.pruning.verify import CutVerifier, Mismatch
from hgnp.pruning.widths import Shape
from hgnp.removal import Listener, Removal, listeners_of
from hgnp.validation import check_flags, check_values

CONFIG_HINT = "the network's config cannot state these widths: use hgnp.save and hgnp.load, not save_pretrained"

NO_SCORES = "no layer has scores: those of derivatives leave out layers that are read where no gate can be placed"


class Neurons:
    """The neurons of a network: the output units of its linear layers and the filters of its convolutions.

    The forward pass is traced on the example input in training and in evaluation mode, and every channel is propagated through
    it. Neurons whose channels are added, concatenated, normalised or reshaped together are coupled: they are removed together.
    Removing neurons then equals masking them, that is setting their output to zero wherever it is read. Neurons for which the
    network's own code or an operator without a rule prevents this are `frozen`, with the reason.

    >>> import torch, hgnp
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> neurons = hgnp.Neurons(net, torch.zeros(1, 4))
    >>> neurons.layers
    (Layer(name='0', alive=8, total=8),)
    >>> neurons.frozen
    (Frozen(name='2', reason="it is the network's output", count=2),)
    >>> scores = hgnp.sensitivity(net, neurons, [(torch.randn(16, 4), torch.arange(16) % 2)])
    >>> neurons.remove(neurons.least(scores, 3))
    Selection(3 neurons; 0: 3)
    >>> net[0].weight.shape, net[2].in_features
    (torch.Size([5, 4]), 5)

    Args:
        net: The network. It is pruned in place.
        example_input: A tensor, a tuple of positional arguments or a dict of keyword arguments.
        protect: Names of layers, or of modules whose layers are all protected.
        approximate: Whether channels that a norm mixes (LayerNorm, GroupNorm, RMSNorm) can be removed too. The outputs then
            change by more than masking changes them.
        outputs: Which of the returned tensors count: a function of what the network returns, in training and in evaluation
            mode; or a forward function to trace in place of `net.forward`, called with the network and the inputs (or a method
            of one of its modules, called with the inputs). Channels of other tensors that the network returns may be removed:
            `left_out` lists them.

    Attributes:
        net: The network.
        version: Increases with each removal. CUDA graphs, compiled modules and DDP wrappers from before it are stale.
        listeners: Functions that are called with a `Removal` before tensors shrink. Each prepares its own changes and returns a
            function that commits them. Objects such as `Flatness` listen without being added here.
    """

    @refuse_renamed
    def __init__(
        self,
        net: nn.Module,
        example_input: Any,
        *,
        protect: Iterable[str] = (),
        approximate: bool = False,
        outputs: Callable[..., Any] | None = None,
    ) -> None:
        check_prunable(net)
        check_values(net)
        check_flags(approximate=approximate)
        self.net = net
        self.version = 0
        self.listeners: list[Listener] = []
        self._inputs = as_inputs(example_input)
        check_samples(self._inputs)
        self._specs = {name: spec_of(tensor) for name, tensor in tensors_of(net).items()}
        self._protected = protected_modules(net, protect)
        self._approximate, self._outputs = approximate, as_outputs(net, outputs)
        self._parameters_at_start = sum(p.numel() for p in net.parameters())
        self._totals: dict[str, int] = {}
        self._config_agrees = True
        self._caches: Mapping[str, Mapping[str, Any]] = {}
        self._analyse()

    def _analyse(self, traced: TracedForward | None = None) -> None:
        """Finds the slots and their coupling for the network as it is. `traced` is its trace, if there is one already."""
        self._find_neurons(traced)
        if self._verifier.caches and not self._caches:  # of tensors of the current shapes: trace how they are computed
            self._caches = self._verifier.caches
            self._analyse()
            return
        self._look_inside_heads()
        coupling = self._structure.coupling
        everything = torch.cat([*self._layer_slots.values(), torch.zeros(0, dtype=torch.long)])
        if self._structure.stops and not bool(self._structure.frozen[everything].all()):
            self._try_on_data(everything)
        self._structure.measure_untraced()
        self._state = PruningState(self._structure, self._layer_slots, torch.ones(len(coupling), dtype=torch.bool))
        for name, slots in self._layer_slots.items():
            self._totals.setdefault(name, len(slots))
        self._prunable = tuple(
            n for n, slots in self._layer_slots.items() if not bool(self._structure.frozen[slots].all())
        )
        self.__dict__.pop("_branches", None)

    def _find_neurons(self, traced: TracedForward | None, without_heads: frozenset[str] = frozenset()) -> None:
        self._structure = Structure(
            self.net,
            self._inputs,
            self._specs,
            approximate=self._approximate,
            outputs=self._outputs,
            without_heads=without_heads,
            traced=traced,
            caches=self._caches,
        )
        self._layer_slots = self._structure.neuron_slots()
        layers = [name for name, module in self.net.named_modules() if isinstance(module, nn.Linear | _ConvNd)]
        rows = self._structure.layer_rows()
        self._single = [name for name in layers if name not in rows]
        for name, slots in [*rows.items(), *self._layer_slots.items()]:
            if name in self._protected:
                self._structure.coupling.freeze(slots, "it is protected")
        self._verifier = CutVerifier(self._structure)
        self._verifier.freeze_unprunable(torch.cat([*self._layer_slots.values(), torch.zeros(0, dtype=torch.long)]))

    def _look_inside_heads(self) -> None:
        """Where no head can be removed, tries the same position of every head, in one module first: others are like it."""
        structure, modules = self._structure, dict(self.net.named_modules())
        stuck = [name for name, slots in structure.heads().items() if bool(structure.frozen[slots].all())]
        stuck = [name for name in stuck if name not in self._protected]
        alike = [name for name in stuck if type(modules[name]) is type(modules[stuck[0]])]
        for tried in (stuck[:1], alike if len(alike) > 1 else []):
            if tried:
                found = self._structure, self._layer_slots, self._verifier
                self._find_neurons(structure.traced, frozenset(tried))
                inside = [slots for name, slots in self._layer_slots.items() if name not in found[1]]
                if all(bool(self._structure.frozen[slots].all()) for slots in inside):
                    self._structure, self._layer_slots, self._verifier = found
                    return

    def _try_on_data(self, neurons: Tensor) -> None:
        """Freezes everything if, after the point where tracing stops, removal does not equal masking."""
        structure, stop = self._structure, self._structure.stops[0]
        alive = torch.ones(len(structure.coupling), dtype=torch.bool)
        gates = {}
        for loss_needs_training_mode in (False, True):
            gates[loss_needs_training_mode] = find_gates(
                structure, self._layer_slots, alive, per_branch=False, loss_needs_training_mode=loss_needs_training_mode
            )
            roots = torch.tensor(sorted(gates[loss_needs_training_mode].ungated), dtype=torch.long)
            structure.coupling.freeze(roots, f"{depends_on_data(stop)}, and it is read where no gate can be placed")
        structure.update_roots()
        problem = disagreement(structure, gates, self._verifier.sample_cut(neurons))
        if problem is not None:
            structure.coupling.freeze(neurons, f"{depends_on_data(stop)}, and {problem}")
            structure.update_roots()

    # Counting

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Layers with prunable neurons: name, neurons alive, original number of neurons."""
        self._check_shapes()
        return tuple(Layer(name, len(self._state.remaining(name)), self._totals[name]) for name in self._prunable)

    @property
    def frozen(self) -> tuple[Frozen, ...]:
        """Neurons that cannot be removed, by layer and reason."""
        found: Counter[tuple[str, str]] = Counter()
        for name in self._single:
            found[name, "it has a single neuron"] += 1
        for name in self._layer_slots:
            slots = self._state.remaining(name)
            for slot in slots[self._structure.frozen[slots]].tolist():
                found[name, str(self._structure.coupling.reason(slot))] += 1
        return tuple(Frozen(name, reason, count) for (name, reason), count in found.items())

    @property
    def left_out(self) -> tuple[Layer, ...]:
        """Layers with prunable neurons whose channels are in tensors that the network returns and `outputs` leaves out: these
        tensors lose the channels too."""
        roots: set[int] = set()
        for propagation in self._structure.propagations.values():
            for index in propagation.graph.left_out:
                for label in propagation.tensors[index].labels:
                    roots |= set(self._structure.roots[label].flatten().tolist())
        found = []
        for name in self._prunable:
            slots = self._state.remaining(name)
            shared = ~self._structure.frozen[slots] & torch.isin(
                self._structure.roots[slots], torch.tensor(sorted(roots))
            )
            if bool(shared.any()):
                found.append(Layer(name, int(shared.sum()), self._totals[name]))
        return tuple(found)

    @property
    def count(self) -> int:
        """The number of remaining neurons that can be removed."""
        self._check_shapes()
        return self._state.count

    @property
    def kept(self) -> float:
        """The remaining parameters, as a fraction of the original ones."""
        return self.preview({}).kept

    @property
    def macs(self) -> int:
        """Multiply–accumulates of one forward pass of the example input: convolutions, matrix products and recurrent layers."""
        self._check_shapes()
        return self._state.macs

    def preview(self, selection: Mapping[str, Sequence[int]]) -> Preview:
        """The size of the network after `remove(selection)`. Changes nothing."""
        left = self._after(selection)
        parameters = sum(torch.Size(left.shapes[name]).numel() for name, _ in self.net.named_parameters())
        at_start = self._parameters_at_start
        kept = parameters / at_start if at_start else 1.0
        return Preview(parameters, left.count, left.macs, kept)

    # Selecting

    @refuse_renamed
    def least(
        self,
        scores: Scores,
        n: int,
        *,
        coupling: CouplingMode = "coupled",
        floor: int | Mapping[str, int] = 1,
        max_removed: float | Mapping[str, float] = 1.0,
        round_to: int | Mapping[str, int] = 1,
        confirm: bool = True,
    ) -> Selection:
        """The n least important neurons of the whole network.

        Coupled neurons form one unit. Its importance is the mean over its members, and each member counts towards n: a unit
        that no longer fits into n is skipped.

        `floor`, `max_removed` and `round_to` limit every layer alike, or by name: ``floor={"features.*": 8, "*": 2}``. Keys are
        names or `fnmatch` patterns; the first that matches applies, and layers that none matches have the default.

        Args:
            scores: Layer → one number per remaining neuron. Layers without scores keep all their neurons.
            n: How many neurons to select.
            coupling: "coupled" selects the same channels in layers that are added together. "paper" selects the same number in
                each of them, the mean over the layers, at different positions: such a removal no longer equals masking.
            floor: How many neurons each layer keeps.
            max_removed: The largest fraction of a layer's original neurons that is removed.
            round_to: Every layer that loses neurons ends at a multiple of this width. Units are then removed in rounded groups;
                one that no longer fits into n is skipped with all that follow it. A layer that cannot reach a multiple, because
                it is narrower or coupled to a layer that cannot, keeps its width.
            confirm: Whether to trace the smaller network, which takes most of the time, and leave out neurons whose cut does
                not work. False leaves the check to `remove`, for selections that are only previewed.
        """
        n = as_count(n)
        check_coupling(coupling)
        check_flags(confirm=confirm)
        alive = {layer.name: layer.alive for layer in self.layers}
        values = as_values(scores, alive)
        floors = floors_of(floor, max_removed, self._totals)
        multiples = limit_by_layer("round_to", round_to, self._totals)
        if n and alive and not values:
            return self._as_selection((), n, coupling, NO_SCORES)
        return self._select(values, n, alive, floors, multiples, coupling, confirm)

    def _select(
        self,
        values: Values,
        n: int,
        alive: Mapping[str, int],
        floors: Mapping[str, int],
        multiples: Mapping[str, int],
        coupling: CouplingMode,
        confirm: bool,
    ) -> Selection:
        """Some cuts do not work although a smaller one of the same layers does: then these layers keep one neuron (or
        `round_to`) more, once each, or else the units involved are left out. Of units that are all of a tensor, the most
        important one is left out."""
        verifier = self._verifier_of(coupling)  # first: it may analyse the network again
        units, left_out, original_floors = self._state.units, set[int](), floors
        problem: Mismatch | None = None
        while True:
            room = room_of(alive, floors)
            if coupling == "paper":
                chosen = self._least_per_branch(units.listed(values, left_out), values, n, alive, room, multiples)
            elif is_rounded(multiples):
                groups = rounded_groups(units.listed(values, left_out), values, alive, multiples)
                chosen = least_coupled(groups, n, room)
            else:
                chosen = least_coupled(units.ranked(values, left_out), n, room)
            emptying = self._emptying(chosen, coupling)
            if emptying:
                left_out.add(max(emptying, key=lambda root: (units.unit(root).importance(values), root)))
                continue
            cut = self._as_selection(chosen, n, coupling, None if chosen or problem is None else problem.reason)
            if not cut or not confirm:
                return cut
            first, left = problem is None, self._after(cut).alive
            problem = verifier.mismatch(left)
            if problem is not None and first and verifier.retrace_if_changed():
                problem = verifier.mismatch(left)
            if problem is None:
                return cut
            roots = set(self._structure.roots[problem.slots].tolist()) - left_out
            blamed = {root for root in roots if root in units}
            left_out |= blamed
            tight = {
                layer
                for root in blamed
                for layer, _ in units.unit(root).members
                if alive[layer] - len(cut.get(layer, ())) < floors[layer] + multiples[layer]
            }
            if tight and floors[min(tight)] == original_floors[min(tight)]:
                floors = {layer: least + multiples[layer] * (layer in tight) for layer, least in floors.items()}
                left_out = set()
            elif not blamed:
                return self._as_selection([], n, coupling, problem.reason)

    def _emptying(self, chosen: Iterable[Unit], coupling: CouplingMode) -> set[int]:
        """The roots of units that would, together, leave nothing of a tensor. One layer's neurons may lie in several tensors:
        talking heads that queries and keys have and those that values have."""
        structure = self._branches.structure if coupling == "paper" else self._structure
        slots = {layer: structure.roots[self._state.remaining(layer)] for layer in self._prunable}
        removed = ~self._state.alive
        for unit in chosen:
            removed[[int(slots[layer][position]) for layer, position in unit.members]] = True
        emptying = structure.emptying(removed)
        return {
            int(self._structure.roots[self._state.remaining(layer)[position]])
            for layer, position in (member for unit in chosen if emptying for member in unit.members)
            if int(slots[layer][position]) in emptying
        }

    def _least_per_branch(
        self,
        units: Sequence[Unit],
        values: Values,
        n: int,
        alive: Mapping[str, int],
        room: Mapping[str, int],
        multiples: Mapping[str, int],
    ) -> list[Unit]:
        groups = self._branches.branch_groups(units, self._layer_slots, self._state.alive)
        if not is_rounded(multiples):
            return least_paper(groups, values, n, room)
        tiers = [tier for branches in groups for tier in tiers_of(branches, values)]
        return least_coupled(rounded_groups(tiers, values, alive, multiples), n, room)

    def _as_selection(
        self, units: Iterable[Unit], n: int, coupling: CouplingMode, problem: str | None = None
    ) -> Selection:
        positions: dict[str, list[int]] = defaultdict(list)
        for unit in units:
            for layer, position in unit.members:
                positions[layer].append(position)
        return Selection(positions, requested=n, version=self.version, coupling=coupling, problem=problem)

    # Scoring

    def weights(self, layer: str) -> Tensor:
        """The weights into the remaining neurons of a layer, neurons first."""
        self._check_layer(layer)
        return self._state.weights(layer)

    def norm_scale(self, layer: str) -> Tensor | None:
        """The scale of the norm that reads the layer's output, one number per remaining neuron; None without a norm."""
        self._check_layer(layer)
        return self._state.norm_scale(layer)

    def gates(self, coupling: CouplingMode = "coupled", *, loss_needs_training_mode: bool = False) -> Gates:
        """Where the output of each neuron is read, for scores that are derivatives.

        Args:
            coupling: "coupled": layers that are added together share their gates. "paper": each of them has its own.
            loss_needs_training_mode: Whether gates are for training mode with norms and dropout in evaluation mode, instead
                of for evaluation mode.
        """
        check_coupling(coupling)
        self._check_shapes()
        structure = self._branches.structure if coupling == "paper" else self._structure
        slots = {name: self._layer_slots[name] for name in self._prunable}
        alive, verified = self._state.alive, self._verifier.verified
        now = None
        if not bool(alive.all()):
            known = verified is not None and not loss_needs_training_mode and self._verifier.is_verified(alive)
            now = (
                verified[1].graphs[False]
                if known and verified
                else structure.trace_now(self._inputs, loss_needs_training_mode=loss_needs_training_mode)
            )
        return find_gates(
            structure,
            slots,
            alive,
            per_branch=coupling == "paper",
            loss_needs_training_mode=loss_needs_training_mode,
            now=now,
        )

    def _check_layer(self, layer: str) -> None:
        if layer not in self._layer_slots:
            raise InputError(f"layer must be one with neurons, got {layer!r}{did_you_mean(layer, self._layer_slots)}")

    # Removing

    def remove(
        self,
        selection: Mapping[str, Sequence[int]],
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        *,
        also: Iterable[nn.Module] = (),
    ) -> Selection:
        """Removes neurons from the network: rows, norm entries and statistics, consumers' columns, gradients.

        Neurons that are coupled to the selected ones are removed too; the result lists all of them. Parameters stay the same
        objects. If anything fails, nothing changes.

        Args:
            selection: Layer → positions of neurons, from `least` or written by hand.
            optimizer: An optimizer of the network, or several, whose state is cut with the parameters, also those of `also`.
            also: Networks of the same shape, such as a moving average, that are cut too.
        """
        left = self._after(selection)
        removed = self._removed(left, selection)
        if not removed:
            return removed
        copies = check_copies(self.net, also)
        removal = self._removal(left, removed)
        changes = changes_to_net(self.net, removal)
        for copy in copies:
            changes += changes_to_net(copy, removal)
        for each in optimizer if isinstance(optimizer, Iterable) else [optimizer]:
            if each is not None:
                changes += changes_to_optimizer([self.net, *copies], each, removal)
        commits = [listener(removal) for listener in [*listeners_of(self.net), *self.listeners]]
        commit([*changes, *(Change(apply) for apply in commits)])
        verifier = self._verifier_of(removed.coupling)
        verifier.after_removal()
        self._state = left
        agreed, self._config_agrees = self._config_agrees, all(update_config(each) for each in [self.net, *copies])
        self.version += 1
        if removed.coupling == "paper":  # different channels are combined now
            assert verifier.verified is not None
            self._analyse(verifier.verified[1])
        if agreed and not self._config_agrees:
            warnings.warn(CONFIG_HINT, stacklevel=2)
        return removed

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """InputError if a removal could not cut the optimizer's state, which exists from its first step on."""
        check_optimizer([self.net], optimizer, [name for name in self._state.shapes if not self._has_no_neurons(name)])

    def _verifier_of(self, coupling: CouplingMode) -> CutVerifier:
        return self._branches.verifier if coupling == "paper" else self._verifier

    def _check_shapes(self) -> None:
        """InputError unless the network's tensors have the shapes of this object's state, apart from buffers without channels
        of neurons, such as rotary embeddings: the code may create or extend them when it needs more."""
        resized = {}
        for name, tensor in tensors_of(self.net).items():
            expected = self._state.shapes.get(name)
            if tensor.shape == expected:
                continue
            if not isinstance(tensor, nn.Parameter) and self._has_no_neurons(name):
                resized[name] = tuple(tensor.shape)
                continue
            if expected is None:
                raise InputError(
                    f"{name} must not exist, got a parameter that was added after Neurons was created: create it again"
                )
            raise InputError(
                f"{name} must have shape {expected}, got {tuple(tensor.shape)}; the network changed after Neurons was "
                "created: create it again. After load_state_dict, shrink the network by hgnp.load(path, net)"
            )
        self._update(resized)

    def _update(self, resized: Mapping[str, Shape]) -> None:
        """Traces the network again if these buffers have other shapes now, or a value that its code reads has changed."""
        try:
            self._structure.update(resized)
            if "_branches" in self.__dict__:
                self._branches.structure.update(resized)
        except PathError as error:
            if not resized:
                raise
            raise InputError(
                f"{', '.join(resized)} must have no channels of neurons, got another shape since Neurons was created, and "
                f"{error.reason}: create it again"
            ) from error
        if resized:
            self._state = PruningState(self._structure, self._layer_slots, self._state.alive)
            self._verifier.verified = None
            if "_branches" in self.__dict__:
                self._branches.verifier.verified = None

    def _has_no_neurons(self, name: str) -> bool:
        """Whether no removal cuts this tensor."""
        structure = self._structure
        none = torch.zeros(0, dtype=torch.long)
        slots = torch.cat([none, *(slots for (owner, _), slots in structure.coupling.slots.items() if owner == name)])
        neurons = torch.cat([none, *self._layer_slots.values()])
        removable = structure.roots[neurons[~structure.frozen[neurons]]]
        return not bool(torch.isin(structure.roots[slots], removable).any())

    def _after(self, selection: Mapping[str, Sequence[int]]) -> PruningState:
        self._check_shapes()
        if isinstance(selection, Selection) and selection.version != self.version:
            raise InputError(
                f"selection must be of version {self.version}, got {selection.version}: positions change with each removal; "
                "select again"
            )
        if isinstance(selection, Mapping) and not selection:
            return self._state  # with what is known of it, such as its shapes and MACs
        roots = (self._branches.structure if coupling_of(selection) == "paper" else self._structure).roots
        return self._state.without(selection, roots)

    def _removed(self, left: PruningState, selection: Mapping[str, Sequence[int]]) -> Selection:
        positions = self._state.removed(left)
        requested = getattr(selection, "requested", sum(map(len, positions.values())))
        return Selection(positions, requested=requested, version=self.version, coupling=coupling_of(selection))

    def _removal(self, left: PruningState, removed: Selection) -> Removal:
        self._structure.check_counts(self._state.alive)
        verifier = self._verifier_of(removed.coupling)
        if not verifier.is_verified(left.alive):  # `least` has verified the cut that it proposed
            problem = verifier.mismatch(left.alive)
            if problem is not None and verifier.retrace_if_changed():
                problem = verifier.mismatch(left.alive)
            if problem is not None:
                raise InputError(
                    f"selection must be removable as a whole, got neurons of {', '.join(removed)}: {problem.reason}"
                )
        return self._structure.removal(self._state.alive, left.alive)

    # Saving and restoring

    def state_dict(self) -> dict[str, Any]:
        """The remaining neurons and the original sizes. A `Neurons` of the network at its original size can load them (with
        coupling "paper": of the network at its current size)."""
        return {
            "alive": self._state.alive.clone(),
            "totals": dict(self._totals),
            "parameters_at_start": self._parameters_at_start,
            "version": self.version,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned.

        Args:
            state: What `state_dict` of a `Neurons` of the same network returned.
        """
        if missing := self.state_dict().keys() - (state if isinstance(state, Mapping) else {}):
            raise InputError(f"state must come from state_dict(), got one without {', '.join(sorted(missing))}")
        if not isinstance(state["alive"], Tensor) or state["alive"].dim() != 1:
            raise InputError(f"state['alive'] must be a tensor with one entry per slot, got {state['alive']!r}")
        slots, expected = len(state["alive"]), len(self._state.alive)
        if slots != expected:
            raise InputError(
                f"state must be of this network at its original size ({expected} slots), got {slots} slots"
            )
        self._state = PruningState(self._structure, self._layer_slots, state["alive"].cpu().clone())
        self._totals = dict(state["totals"])
        self._parameters_at_start, self.version = state["parameters_at_start"], state["version"]

    @cached_property
    def _branches(self) -> BranchCoupling:
        if not bool(self._state.alive.all()):
            self._analyse()  # branch coupling numbers the slots of the network as it is
        return BranchCoupling(self._structure, approximate=self._approximate)

    # Printing

    def __repr__(self) -> str:
        frozen = sum(entry.count for entry in self.frozen)
        return (
            f"Neurons({type(self.net).__name__}: {self.count} prunable in {len(self.layers)} layers, {frozen} frozen, "
            f"{self.kept:.1%} of the parameters kept)"
        )

    def __str__(self) -> str:
        """A table with one line per layer, and one line per reason for frozen neurons."""
        text = table(self.layers, self.frozen, self.left_out, self.preview({}))
        return text if self._config_agrees else f"{text}\n{CONFIG_HINT}"
