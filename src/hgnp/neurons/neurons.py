"""`Neurons`: every neuron of a network, which belong together, and their removal."""

import difflib
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from hgnp.neurons.confirm import confirm
from hgnp.neurons.gates import Gates, find_gates
from hgnp.neurons.graph import tensors_of
from hgnp.neurons.lanes import Lanes
from hgnp.neurons.layers import as_inputs, inside, rows_of
from hgnp.neurons.reading import norm_scale_of, weights_of
from hgnp.neurons.refuse import refuse
from hgnp.neurons.selection import Coupling, Scores, Selection, Unit, as_lists, floors_of, least_coupled, least_paper
from hgnp.neurons.structure import Structure
from hgnp.neurons.summary import Frozen, Layer, Preview, table
from hgnp.neurons.surgery import Change, changes_to_net, changes_to_optimizer, check_twin, commit
from hgnp.removal import Listener, Removal, listeners_of


class Neurons:
    """Every neuron of `net`: the output units of its linear layers and the filters of its convolutions.

    The forward is recorded on `example_input` (a tensor, a tuple of positional or a dict of keyword arguments) in train and
    in eval mode and every channel is followed through it, so that neurons whose channels are added, concatenated, normalised
    or reshaped together are known to live and die together. Removing neurons then equals masking them: their output, as
    everything after them sees it, is zero. What the network's own code does not allow, and what is not understood, is
    `frozen` with the reason.

    `protect` names layers, or modules whose layers all stay. With `approximate=True` channels that a norm mixes (LayerNorm,
    GroupNorm, RMSNorm) may go too; the network's outputs then change by more than masking would change them.
    """

    def __init__(
        self, net: nn.Module, example_input: Any, *, protect: Iterable[str] = (), approximate: bool = False
    ) -> None:
        refuse(net)
        self.net = net
        self.version = 0
        self.listeners: list[Listener] = []
        """Called with a `Removal` before tensors shrink; each prepares and returns a function that commits. Objects made
        for this network, such as `Flatness`, listen by themselves."""
        self._inputs = as_inputs(example_input)
        self._protect = inside(net, protect)
        self._approximate = approximate
        self._parameters_at_start = sum(p.numel() for p in net.parameters())
        self._totals: dict[str, int] = {}
        self._trace()

    def _trace(self) -> None:
        self._structure = Structure(self.net, self._inputs, approximate=self._approximate)
        self._rows = rows_of(self.net, self._structure)
        layers = [name for name, module in self.net.named_modules() if isinstance(module, nn.Linear | _ConvNd)]
        self._single = [name for name in layers if name not in self._rows]
        ties = self._structure.ties
        for name, rows in self._rows.items():
            if name in self._protect:
                ties.fix(rows, "it is protected")
        confirm(self._structure, torch.cat([*self._rows.values(), torch.zeros(0, dtype=torch.long)]))
        self._alive = torch.ones(len(ties), dtype=torch.bool)
        self._tried: Tensor | None = None
        for name, rows in self._rows.items():
            self._totals.setdefault(name, len(rows))
        self._prunable = tuple(n for n, rows in self._rows.items() if not bool(self._structure.fixed[rows].all()))
        self.__dict__.pop("_lanes", None)

    # What there is

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Layers with neurons that can be removed: name, neurons alive, neurons at the start."""
        return tuple(
            Layer(name, int(self._alive[self._rows[name]].sum()), self._totals[name]) for name in self._prunable
        )

    @property
    def frozen(self) -> tuple[Frozen, ...]:
        """Neurons that stay, by layer and reason."""
        found: Counter[tuple[str, str]] = Counter()
        for name in self._single:
            found[name, "it has a single neuron"] += 1
        for name, rows in self._rows.items():
            for slot in rows[self._structure.fixed[rows] & self._alive[rows]].tolist():
                found[name, str(self._structure.ties.reason(slot))] += 1
        return tuple(Frozen(name, reason, count) for (name, reason), count in found.items())

    @property
    def count(self) -> int:
        """Living neurons that can be removed."""
        return sum(int((~self._structure.fixed[rows] & self._alive[rows]).sum()) for rows in self._rows.values())

    @property
    def kept(self) -> float:
        """Parameters left, as a fraction of those at the start."""
        return self.preview({}).kept

    @property
    def macs(self) -> int:
        """Multiply–accumulates of one forward of the example input: convolutions and matrix products."""
        return self._structure.macs(self._alive)

    def preview(self, selection: Mapping[str, Sequence[int]]) -> Preview:
        """What would be left after `remove(selection)`. Changes nothing."""
        return self._measure(self._after(selection))

    def _measure(self, alive: Tensor) -> Preview:
        shapes = self._structure.shapes | self._structure.shapes_after(alive)
        parameters = sum(torch.Size(shapes[name]).numel() for name, _ in self.net.named_parameters())
        neurons = sum(int((~self._structure.fixed[rows] & alive[rows]).sum()) for rows in self._rows.values())
        at_start = self._parameters_at_start
        return Preview(parameters, neurons, self._structure.macs(alive), parameters / at_start if at_start else 1.0)

    # Choosing

    def least(
        self, scores: Scores, n: int, *, coupling: Coupling = "coupled", floor: int | Mapping[str, int] = 1
    ) -> Selection:
        """The n least important neurons over the whole network.

        Neurons that live and die together are one unit, as important as its members on average, and count each for itself: a
        unit that no longer fits into n is skipped. Layers without scores keep all their neurons; every layer keeps `floor`.
        `coupling="paper"` instead takes the same number from each of the layers that are added together, the average of what
        each was due, at different places: removing that is no longer the same as masking.
        """
        if isinstance(n, bool) or not hasattr(n, "__index__") or operator.index(n) < 0:
            raise ValueError(f"n must be a whole number of neurons, 0 or more, not {n!r}")
        n = operator.index(n)
        if coupling not in ("coupled", "paper"):
            raise ValueError(f"coupling must be 'coupled' or 'paper', not {coupling!r}")
        alive = {layer.name: layer.alive for layer in self.layers}
        values = as_lists(scores, alive)
        floors = floors_of(floor, alive)
        if coupling == "paper":
            room = {name: max(alive[name] - floors[name], 0) for name in alive}
            families = self._lanes.families(list(self._units().values()), self._rows, self._alive)
            families = [[_scored(lane, values) for lane in lanes] for lanes in families]
            return self._selected(least_paper([f for f in families if all(f)], values, n, room), n, coupling)
        units = self._units()
        while True:
            room = {name: max(alive[name] - floors[name], 0) for name in alive}
            cut = self._selected(least_coupled(_scored(units.values(), values), values, n, room), n, coupling)
            if not cut:
                return cut
            after = self._after(cut)
            found = self._structure.misfit(after)
            if found is None:
                self._tried = after
                return cut
            # Some cuts do not fit though their like did. Leave the layers concerned one neuron more, or the units alone.
            guilty = [units.pop(root) for root in set(self._structure.roots[found.slots].tolist()) & units.keys()]
            tight = {
                layer
                for unit in guilty
                for layer, _ in unit.members
                if alive[layer] - len(cut.get(layer, ())) <= floors[layer]
            }
            if tight and floors[min(tight)] == floors_of(floor, alive)[min(tight)]:
                floors |= {layer: floors[layer] + 1 for layer in tight}
                units = self._units()
            elif not guilty:
                return self._selected([], n, coupling)

    def _selected(self, units: Iterable[Unit], n: int, coupling: Coupling) -> Selection:
        positions: dict[str, list[int]] = defaultdict(list)
        for unit in units:
            for layer, position in unit.members:
                positions[layer].append(position)
        return Selection(positions, requested=n, version=self.version, coupling=coupling)

    def _units(self) -> dict[int, Unit]:
        """Living neurons that may go, by what they hang on."""
        members: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for name, rows in self._rows.items():
            living = rows[self._alive[rows]]
            free = ~self._structure.fixed[living]
            for position, root in zip(
                free.nonzero().squeeze(1).tolist(), self._structure.roots[living[free]].tolist(), strict=True
            ):
                members[root].append((name, position))
        return {root: Unit(tuple(unit)) for root, unit in members.items()}

    def weights(self, layer: str) -> Tensor:
        """The weights that lead into the living neurons of a layer, neurons first."""
        return weights_of(self._structure, self._rows[layer], self._alive)

    def norm_scale(self, layer: str) -> Tensor | None:
        """The scale of the norm that reads the layer's output, one number a living neuron."""
        return norm_scale_of(self._structure, layer)

    def gates(self, coupling: Coupling = "coupled") -> Gates:
        """Where the output of each neuron is read, for scores that are derivatives. With "paper", layers that are added
        together have gates of their own."""
        structure = self._lanes.structure if coupling == "paper" else self._structure
        rows = {name: self._rows[name] for name in self._prunable}
        return find_gates(structure, rows, self._alive, lanes=coupling == "paper")

    # Removing

    def remove(
        self,
        selection: Mapping[str, Sequence[int]],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        also: Iterable[nn.Module] = (),
    ) -> Selection:
        """Take neurons out of the network: rows, norm entries and statistics, consumers' columns, gradients.

        Neurons that live and die with the selected ones go too; what went is returned. `optimizer` has its state cut along,
        and so have the networks in `also` (of the same shape, such as a moving average) and all `listeners`. Parameters stay
        the objects they were. If anything fails, nothing has changed.
        """
        twins = list(also)
        alive = self._after(selection)
        gone = self._gone(alive, selection)
        if not gone:
            return gone
        for place, twin in enumerate(twins):
            check_twin(self.net, twin, place)
        removal = self._removal(alive, gone)
        changes = changes_to_net(self.net, removal)
        for twin in twins:
            changes += changes_to_net(twin, removal)
        if optimizer is not None:
            changes += changes_to_optimizer(self.net, optimizer, removal)
        commits = [listener(removal) for listener in [*listeners_of(self.net), *self.listeners]]
        commit([*changes, *(Change(make) for make in commits)])
        self._alive = alive
        self.version += 1
        if gone.coupling == "paper":
            self._trace()  # other channels stand side by side now
        return gone

    def _structure_for(self, selection: Mapping[str, Sequence[int]]) -> Structure:
        return self._lanes.structure if getattr(selection, "coupling", "coupled") == "paper" else self._structure

    def _after(self, selection: Mapping[str, Sequence[int]]) -> Tensor:
        """Which slots are alive once the selection, and what hangs on it, is gone. Names what is wrong with it."""
        if isinstance(selection, Selection) and selection.version != self.version:
            raise ValueError("this selection was made before the last removal: positions have moved; select again")
        roots = self._structure_for(selection).roots
        dead = torch.zeros(len(roots), dtype=torch.bool)
        for layer, positions in selection.items():
            slots = self._slots(layer, positions)
            frozen = slots[self._structure.fixed[slots]]
            if len(frozen):
                raise ValueError(f"{layer}: neurons cannot be removed: {self._structure.ties.reason(int(frozen[0]))}")
            dead[roots[slots]] = True
        alive = self._alive & ~dead[roots]
        for layer in selection:
            if not bool(alive[self._rows[layer]].any()):
                raise ValueError(f"{layer}: the selection would leave it without neurons")
        for (name, _), slots in self._structure.ties.slots.items():
            if not bool(alive[slots].any()):
                raise ValueError(f"{name}: the selection, with what hangs on it, would leave nothing of it")
        return alive

    def _slots(self, layer: str, positions: Sequence[int]) -> Tensor:
        if layer not in self._rows:
            known = difflib.get_close_matches(str(layer), self._rows) or list(self._rows)[:3]
            raise ValueError(
                f"selection: no layer {layer!r} with neurons; did you mean {' or '.join(known) or 'another network'}?"
            )
        living = self._rows[layer][self._alive[self._rows[layer]]]
        try:
            chosen = torch.as_tensor(list(positions))
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"{layer}: positions must be a list of whole numbers, not {positions!r}") from None
        if chosen.dim() != 1 or (len(chosen) and (chosen.is_floating_point() or chosen.dtype == torch.bool)):
            raise ValueError(f"{layer}: positions must be a list of whole numbers, not {positions!r}")
        chosen = chosen.long().cpu()
        wrong = chosen[(chosen < 0) | (chosen >= len(living))]
        if len(wrong):
            raise ValueError(
                f"{layer}: no neuron {int(wrong[0])}; it has {len(living)} living ones, 0 to {len(living) - 1}"
            )
        return living[chosen]

    def _gone(self, alive: Tensor, selection: Mapping[str, Sequence[int]]) -> Selection:
        positions = {
            name: (~alive[rows[self._alive[rows]]]).nonzero().squeeze(1).tolist() for name, rows in self._rows.items()
        }
        taken = sum(len(chosen) for chosen in positions.values())
        coupling: Coupling = getattr(selection, "coupling", "coupled")
        return Selection(
            positions, requested=getattr(selection, "requested", taken), version=self.version, coupling=coupling
        )

    def _removal(self, alive: Tensor, gone: Selection) -> Removal:
        structure = self._structure
        expected = structure.shapes | structure.shapes_after(self._alive)
        for name, tensor in tensors_of(self.net).items():
            if tuple(tensor.shape) != expected.get(name):
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}; the network was changed after Neurons was made"
                )
        known = self._tried is not None and torch.equal(alive, self._tried)  # `least` has just been there
        found = None if known else self._structure_for(gone).misfit(alive, aligned=gone.coupling == "coupled")
        if found is not None:
            raise ValueError(f"these neurons cannot be removed together ({', '.join(gone)}): {found.reason}")
        slices: dict[str, dict[int, Tensor]] = defaultdict(dict)
        for (name, dim), slots in structure.ties.slots.items():
            stay = alive[slots[self._alive[slots]]]
            if not bool(stay.all()):
                slices[name][dim] = stay.nonzero().squeeze(1)
        widths = {}
        for name, module, stated in structure.widths_after(alive):
            changed = {attribute: value for attribute, value in stated.items() if getattr(module, attribute) != value}
            if changed:
                widths[name] = changed
        return Removal(dict(slices), widths)

    # To go on elsewhere

    def state_dict(self) -> dict[str, Any]:
        """Who is alive and what there was at the start. To be loaded by a `Neurons` made of the network as it was when this
        one was made (with coupling "paper": as it is now)."""
        return {
            "alive": self._alive.clone(),
            "totals": dict(self._totals),
            "parameters_at_start": self._parameters_at_start,
            "version": self.version,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["alive"].shape != self._alive.shape:
            raise ValueError("state: it is of another network, or of this one at another size")
        self._alive, self._tried = state["alive"].clone(), None
        self._totals = dict(state["totals"])
        self._parameters_at_start, self.version = state["parameters_at_start"], state["version"]

    @cached_property
    def _lanes(self) -> Lanes:
        if not bool(self._alive.all()):
            self._trace()  # lanes number the slots of the network as it is
        return Lanes(self.net, self._inputs, self._approximate)

    # To look at

    def __repr__(self) -> str:
        frozen = sum(entry.count for entry in self.frozen)
        return (
            f"Neurons({type(self.net).__name__}: {self.count} in {len(self.layers)} layers can go, {frozen} are frozen, "
            f"{self.kept:.1%} of the parameters kept)"
        )

    def __str__(self) -> str:
        """A table: a line a layer, then a line for each reason why others are frozen."""
        return table(self.layers, self.frozen, self.preview({}))


def _scored(units: Iterable[Unit], scores: Mapping[str, list[float]]) -> list[Unit]:
    return [unit for unit in units if all(layer in scores for layer, _ in unit.members)]
