"""`Neurons`: every neuron of a network, which belong together, and their removal."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from hgnp.errors import InputError, refuse_renamed
from hgnp.pruning.branch_coupling import Lanes, least_paper, side_by_side
from hgnp.pruning.gates import Gates, find_gates
from hgnp.pruning.graph import tensors_of
from hgnp.pruning.layers import as_inputs, inside, rows_of
from hgnp.pruning.neuron_weights import norm_scale_of, weights_of
from hgnp.pruning.rounding import bundled
from hgnp.pruning.selection import (
    Coupling,
    Scores,
    Selection,
    Unit,
    Values,
    as_count,
    as_lists,
    as_round_to,
    coupling_of,
    floors_of,
    least_coupled,
    room_of,
    scored,
)
from hgnp.pruning.state import Living
from hgnp.pruning.structure import Recorded, Structure
from hgnp.pruning.summary import Frozen, Layer, Preview, table
from hgnp.pruning.surgery import Change, changes_to_net, changes_to_optimizer, commit, twins_of
from hgnp.pruning.trial_cuts import confirm as confirm_all
from hgnp.pruning.validation import refuse
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

    def _trace(self, seen: Recorded | None = None) -> None:
        self._structure = Structure(self.net, self._inputs, approximate=self._approximate, seen=seen)
        self._rows = rows_of(self.net, self._structure)
        layers = [name for name, module in self.net.named_modules() if isinstance(module, nn.Linear | _ConvNd)]
        self._single = [name for name in layers if name not in self._rows]
        ties = self._structure.ties
        for name, rows in self._rows.items():
            if name in self._protect:
                ties.fix(rows, "it is protected")
        confirm_all(self._structure, torch.cat([*self._rows.values(), torch.zeros(0, dtype=torch.long)]))
        self._living = Living(self._structure, self._rows, torch.ones(len(ties), dtype=torch.bool))
        self._tried: tuple[Coupling, Tensor] | None = None
        for name, rows in self._rows.items():
            self._totals.setdefault(name, len(rows))
        self._prunable = tuple(n for n, rows in self._rows.items() if not bool(self._structure.fixed[rows].all()))
        self.__dict__.pop("_lanes", None)

    # What there is

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Layers with neurons that can be removed: name, neurons alive, neurons at the start."""
        self._check()
        return tuple(Layer(name, len(self._living.of(name)), self._totals[name]) for name in self._prunable)

    @property
    def frozen(self) -> tuple[Frozen, ...]:
        """Neurons that stay, by layer and reason."""
        found: Counter[tuple[str, str]] = Counter()
        for name in self._single:
            found[name, "it has a single neuron"] += 1
        for name in self._rows:
            living = self._living.of(name)
            for slot in living[self._structure.fixed[living]].tolist():
                found[name, str(self._structure.ties.reason(slot))] += 1
        return tuple(Frozen(name, reason, count) for (name, reason), count in found.items())

    @property
    def count(self) -> int:
        """Living neurons that can be removed."""
        self._check()
        return self._living.count

    @property
    def kept(self) -> float:
        """Parameters left, as a fraction of those at the start."""
        return self.preview({}).kept

    @property
    def macs(self) -> int:
        """Multiply–accumulates of one forward of the example input: convolutions and matrix products."""
        self._check()
        return self._structure.macs(self._living.alive)

    def preview(self, selection: Mapping[str, Sequence[int]]) -> Preview:
        """What would be left after `remove(selection)`. Changes nothing."""
        left = self._after(selection)
        parameters = sum(torch.Size(left.shapes[name]).numel() for name, _ in self.net.named_parameters())
        at_start = self._parameters_at_start
        kept = parameters / at_start if at_start else 1.0
        return Preview(parameters, left.count, self._structure.macs(left.alive), kept)

    # Choosing

    @refuse_renamed
    def least(
        self,
        scores: Scores,
        n: int,
        *,
        coupling: Coupling = "coupled",
        floor: int | Mapping[str, int] = 1,
        max_removed: float = 1.0,
        round_to: int = 1,
        confirm: bool = True,
    ) -> Selection:
        """The n least important neurons over the whole network.

        Neurons that live and die together are one unit, as important as its members on average, and count each for itself: a
        unit that no longer fits into n is skipped. Layers without scores keep all their neurons; every layer keeps `floor`, and
        loses at most the share `max_removed` of the neurons it had at the start.
        `coupling="paper"` instead takes the same number from each of the layers that are added together, the average of what
        each was due, at different places: removing that is no longer the same as masking.

        With `round_to` every layer that loses neurons ends at a width that is a multiple of it: units go in bundles, each as
        important as its neurons on average, and a bundle that no longer fits into n is skipped with all behind it. Layers
        that cannot get there, being narrower or tied to others that cannot, stay as they are.

        Most of the time goes into trying the cut on the network's own code, so that what does not fit is left out.
        `confirm=False` leaves that to `remove`, for cuts that are only to be looked at.
        """
        n, round_to = as_count(n), as_round_to(round_to)
        if coupling not in ("coupled", "paper"):
            raise InputError(f"coupling must be 'coupled' or 'paper', not {coupling!r}")
        alive = {layer.name: layer.alive for layer in self.layers}
        values = as_lists(scores, alive)
        floors = floors_of(floor, max_removed, alive, self._totals)
        return self._fitting(values, n, alive, floors, round_to, coupling, confirm)

    def _fitting(
        self,
        values: Values,
        n: int,
        alive: Mapping[str, int],
        floors: Mapping[str, int],
        round_to: int,
        coupling: Coupling,
        confirm: bool,
    ) -> Selection:
        """Some cuts do not fit though their like did: then the layers concerned are left one neuron (or `round_to`) more, once
        each, or the units alone."""
        structure = self._structure_of(coupling)  # first: it may record the network anew
        units, asked = dict(self._living.units), floors
        while True:
            fit, room = scored(units.values(), values), room_of(alive, floors)
            if coupling == "paper":
                chosen = self._least_apart(fit, values, n, alive, room, round_to)
            else:
                chosen = least_coupled(bundled(fit, values, alive, round_to), n, room)
            cut = self._selected(chosen, n, coupling)
            if not cut or not confirm:
                return cut
            left = self._after(cut)
            found = structure.misfit(left.alive, aligned=coupling == "coupled")
            if found is None:
                self._tried = coupling, left.alive
                return cut
            guilty = [units.pop(root) for root in set(self._structure.roots[found.slots].tolist()) & units.keys()]
            tight = {
                layer
                for unit in guilty
                for layer, _ in unit.members
                if alive[layer] - len(cut.get(layer, ())) < floors[layer] + round_to
            }
            if tight and floors[min(tight)] == asked[min(tight)]:
                floors = {layer: least + round_to * (layer in tight) for layer, least in floors.items()}
                units = dict(self._living.units)
            elif not guilty:
                return self._selected([], n, coupling)

    def _least_apart(
        self,
        units: Sequence[Unit],
        values: Values,
        n: int,
        alive: Mapping[str, int],
        room: Mapping[str, int],
        round_to: int,
    ) -> list[Unit]:
        families = self._lanes.families(units, self._rows, self._living.alive)
        if round_to == 1:
            return least_paper(families, values, n, room)
        abreast = [unit for lanes in families for unit in side_by_side(lanes, values)]
        return least_coupled(bundled(abreast, values, alive, round_to), n, room)

    def _selected(self, units: Iterable[Unit], n: int, coupling: Coupling) -> Selection:
        positions: dict[str, list[int]] = defaultdict(list)
        for unit in units:
            for layer, position in unit.members:
                positions[layer].append(position)
        return Selection(positions, requested=n, version=self.version, coupling=coupling)

    def weights(self, layer: str) -> Tensor:
        """The weights that lead into the living neurons of a layer, neurons first."""
        return weights_of(self._structure, layer, self._rows[layer], self._living.alive)

    def norm_scale(self, layer: str) -> Tensor | None:
        """The scale of the norm that reads the layer's output, one number a living neuron."""
        return norm_scale_of(self._structure, layer)

    def gates(self, coupling: Coupling = "coupled") -> Gates:
        """Where the output of each neuron is read, for scores that are derivatives. With "paper", layers that are added
        together have gates of their own."""
        self._check()
        structure = self._structure_of(coupling)
        rows = {name: self._rows[name] for name in self._prunable}
        return find_gates(structure, rows, self._living.alive, lanes=coupling == "paper")

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
        left = self._after(selection)
        gone = self._gone(left, selection)
        if not gone:
            return gone
        twins = twins_of(self.net, also)
        removal = self._removal(left, gone)
        changes = changes_to_net(self.net, removal)
        for twin in twins:
            changes += changes_to_net(twin, removal)
        if optimizer is not None:
            changes += changes_to_optimizer(self.net, optimizer, removal)
        commits = [listener(removal) for listener in [*listeners_of(self.net), *self.listeners]]
        commit([*changes, *(Change(make) for make in commits)])
        self._living = left
        self.version += 1
        if gone.coupling == "paper":  # other channels stand side by side now
            tried = self._lanes.structure.tried
            self._trace(None if tried is None or not torch.equal(tried[0], left.alive) else tried[1])
        return gone

    def _structure_of(self, coupling: Coupling) -> Structure:
        return self._lanes.structure if coupling == "paper" else self._structure

    def _check(self) -> None:
        """ValueError if tensors do not have the shapes that this object knows of."""
        for name, tensor in tensors_of(self.net).items():
            if tensor.shape != self._living.shapes.get(name):
                raise InputError(
                    f"{name} has shape {tuple(tensor.shape)}; the network was changed after Neurons was made"
                )

    def _after(self, selection: Mapping[str, Sequence[int]]) -> Living:
        self._check()
        if isinstance(selection, Selection) and selection.version != self.version:
            raise InputError("this selection was made before the last removal: positions have moved; select again")
        return self._living.without(selection, self._structure_of(coupling_of(selection)).roots)

    def _gone(self, left: Living, selection: Mapping[str, Sequence[int]]) -> Selection:
        positions = self._living.gone(left)
        requested = getattr(selection, "requested", sum(map(len, positions.values())))
        return Selection(positions, requested=requested, version=self.version, coupling=coupling_of(selection))

    def _removal(self, left: Living, gone: Selection) -> Removal:
        before = self._living.alive
        coupling, tried = self._tried or (None, before)
        known = coupling == gone.coupling and torch.equal(left.alive, tried)  # `least` has just been there
        found = (
            None if known else self._structure_of(gone.coupling).misfit(left.alive, aligned=gone.coupling == "coupled")
        )
        if found is not None:
            raise InputError(f"these neurons cannot be removed together ({', '.join(gone)}): {found.reason}")
        return self._structure.removal(before, left.alive)

    # To go on elsewhere

    def state_dict(self) -> dict[str, Any]:
        """Who is alive and what there was at the start. To be loaded by a `Neurons` made of the network as it was when this
        one was made (with coupling "paper": as it is now)."""
        return {
            "alive": self._living.alive.clone(),
            "totals": dict(self._totals),
            "parameters_at_start": self._parameters_at_start,
            "version": self.version,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["alive"].shape != self._living.alive.shape:
            raise InputError("state: it is of another network, or of this one at another size")
        self._living = Living(self._structure, self._rows, state["alive"].clone())
        self._tried = None
        self._totals = dict(state["totals"])
        self._parameters_at_start, self.version = state["parameters_at_start"], state["version"]

    @cached_property
    def _lanes(self) -> Lanes:
        if not bool(self._living.alive.all()):
            self._trace()  # lanes number the slots of the network as it is
        return Lanes(self._structure, approximate=self._approximate)

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
