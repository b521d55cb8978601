"""One round of pruning: score neurons, select the least important, remove them."""

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from hgnp.curvature.autodiff.rng import RandomState
from hgnp.curvature.step import State, Step
from hgnp.errors import InputError, RankError, list_names
from hgnp.pruning import Neurons, Preview, Scores, Selection
from hgnp.pruning.importance import WEIGHT_SCORES
from hgnp.pruning.limits import values_of
from hgnp.recipe import Method, Recipe
from hgnp.scoring import Criterion, NotFiniteError, SampleCheck, compute_scores

SEARCH_BELOW = 12  # sizes tried below the bisected one
METHOD_CRITERION: dict[Method, Criterion] = {
    "hgnp": "taylor", "taylor": "taylor", "hybrid": "taylor", "sam": "taylor", "l1": "l1", "l2": "l2",
    "bn_scale": "bn_scale", "geometric_median": "geometric_median", "random": "random",
}  # fmt: skip
"""Method → criterion of the scores."""


class Pruner:
    """Removes neurons, round by round, until at most the fraction `recipe.keep` of `recipe.target` is left.

    The networks in `also` lose the same neurons.
    """

    def __init__(
        self,
        neurons: Neurons,
        step: Step,
        state: State,
        recipe: Recipe,
        optimizer: torch.optim.Optimizer,
        at_start: Preview,
        also: Sequence[nn.Module] = (),
        *,
        loss_needs_training_mode: bool = False,
    ) -> None:
        self.neurons, self.recipe, self.optimizer = neurons, recipe, optimizer
        self.step, self.state = step, state
        self.at_start = at_start
        self.also, self.loss_needs_training_mode = also, loss_needs_training_mode
        self._check = SampleCheck()
        self.problem: str | None = None
        """Why the last round selected nothing although neurons remain."""

    @property
    def left(self) -> float:
        """The fraction left of the target's quantity: parameters, neurons or MACs."""
        return self._fraction(self.neurons.preview({}))

    def _fraction(self, preview: Preview) -> float:
        if self.recipe.target == "params":
            return preview.kept
        if self.recipe.target == "neurons":
            return preview.neurons / self.at_start.neurons if self.at_start.neurons else 1.0
        return preview.macs / self.at_start.macs if self.at_start.macs else 1.0

    def check_reachable(self) -> None:
        """InputError, before any training, if a limit names no layer or the target needs more neurons removed than can be."""
        self._select({}, 0)
        if self.recipe.keep >= 1:
            return
        if not self.neurons.count:
            raise InputError(
                f"keep must be 1 for this network, got {self.recipe.keep:g}: no neuron can be removed "
                f"({self._frozen_reasons()})"
            )
        selectable = self._scored_layers()
        alive = {layer.name: layer.alive for layer in self.neurons.layers}
        most = self._select(
            {name: torch.zeros(alive[name]) for name in alive if name in selectable}, self.neurons.count
        )
        least = self._fraction(self.neurons.preview(most))
        if least > self.recipe.keep:
            frozen = sum(entry.count for entry in self.neurons.frozen)
            without = [name for name in alive if name not in selectable]
            unscored = sum(alive[name] for name in without)
            others = f", {unscored} neurons ({list_names(without)}) have no {self._criterion} score" if without else ""
            reachable = math.ceil(least * 1e4) / 1e4  # rounded up, so that it can be met
            raise InputError(
                f"keep must be at least {reachable:g} of the {self.recipe.target}, got {self.recipe.keep:g}: every layer keeps "
                f"{self._layer_limits()}{others} and {frozen} neurons are frozen (print(hgnp.Neurons(net, x)) says why)"
            )

    def check_scores(self, batch: tuple[Any, Any]) -> None:
        """Raises, before any training, what the first round would: for a network that cannot be scored. Without the flatness
        penalty, which no step has found a direction for. Scores that are not finite are left to training."""
        if self.recipe.keep < 1 and self._criterion not in WEIGHT_SCORES:
            with warnings.catch_warnings(action="ignore"), suppress(NotFiniteError):
                self._scores([batch], mu=0.0, graphs=False, check=SampleCheck())

    def _scores(
        self, batches: list[tuple[Any, Any]], *, mu: float, graphs: bool, check: SampleCheck | None = None
    ) -> Scores:
        return compute_scores(
            self.neurons, batches, self.step, self.state, mu=mu, coupling=self.recipe.coupling,
            criterion=self._criterion, graphs=graphs, loss_needs_training_mode=self.loss_needs_training_mode,
            check=check or self._check,
        )  # fmt: skip

    def _layer_limits(self) -> str:
        """What every layer keeps, in words."""
        floor, round_to, max_removed = self.recipe.floor, self.recipe.round_to, self.recipe.max_removed
        if isinstance(floor, Mapping) or isinstance(round_to, Mapping) or isinstance(max_removed, Mapping):
            return f"what floor={floor}, round_to={round_to} and max_removed={max_removed} leave"
        keeps = f"{floor}" if round_to == 1 else f"a multiple of {round_to}"
        return keeps if max_removed == 1 else f"{keeps} or {1 - max_removed:.1%} of its neurons, whichever is more"

    @property
    def _rounded(self) -> bool:
        return max(values_of(self.recipe.round_to), default=1) > 1

    def _scored_layers(self) -> Collection[str]:
        """Layers that the criterion has scores for: some have no norm after them, or no place for a gate."""
        if self._criterion not in WEIGHT_SCORES:
            return self.neurons.gates(
                self.recipe.coupling, loss_needs_training_mode=self.loss_needs_training_mode
            ).layer_units
        with RandomState(*self.neurons.net.parameters()):
            return WEIGHT_SCORES[self._criterion](self.neurons)

    def _frozen_reasons(self) -> str:
        reasons: dict[str, list[str]] = {}
        for entry in self.neurons.frozen:
            reasons.setdefault(entry.reason, []).append(entry.name)
        why = "; ".join(f"{list_names(names)}: {reason}" for reason, names in reasons.items())
        return why or "it has no linear or convolutional layer"

    @property
    def _criterion(self) -> Criterion:
        return METHOD_CRITERION[self.recipe.method]

    def round(self, batches: list[tuple[Any, Any]]) -> int:
        """Remove `recipe.neurons_per_round` neurons, fewer if the target needs fewer. Returns how many were removed: 0 once no
        more can be."""
        mu = self.recipe.scoring_mu if self.recipe.uses_penalty(self.neurons.kept) else 0.0
        scores = self._scores(batches, mu=mu, graphs=self.recipe.execution != "eager")
        selection = self._agreed(partial(self._chosen, scores))
        self.problem = selection.problem
        return self.neurons.remove(selection, self.optimizer, also=self.also).taken if selection else 0

    def _chosen(self, scores: Scores) -> Selection:
        """The neurons of a round."""
        n = min(self.recipe.neurons_per_round, self.neurons.count)
        selection = self._select(scores, n)
        while not selection and n < self.neurons.count:  # every coupled group is larger than a round
            n = min(2 * n, self.neurons.count)
            selection = self._select(scores, n)
        if selection and self._fraction(self.neurons.preview(selection)) < self.recipe.keep:
            selection = self._trim_to_target(scores, n, selection)
        return selection

    def _agreed(self, choose: Callable[[], Selection]) -> Selection:
        """What `choose` returns, on every rank what it returns on rank 0. RankError, before anything is cut, if ranks would cut
        different networks."""
        reducer = self.step.reducer
        if reducer.ranks == 1:
            return choose()

        def encoded() -> bytes:
            chosen = choose()
            return json.dumps([chosen, chosen.requested, chosen.version, chosen.coupling, chosen.problem]).encode()

        data = reducer.on_rank_zero(encoded)
        positions, requested, version, coupling, problem = json.loads(data)
        shapes = {name: list(tensor.shape) for name, tensor in self.neurons.net.state_dict().items()}
        own = hashlib.sha256(data + json.dumps([shapes, self.neurons.version]).encode()).digest()
        if len(set(reducer.gather(own))) > 1:
            raise RankError(
                "ranks must remove the same neurons from the same network, got networks that differ in shape"
            )
        return Selection(positions, requested=requested, version=version, coupling=coupling, problem=problem)

    def _select(self, scores: Scores, n: int, *, confirm: bool = True) -> Selection:
        return self.neurons.least(
            scores, n, coupling=self.recipe.coupling, floor=self.recipe.floor,
            max_removed=self.recipe.max_removed, round_to=self.recipe.round_to, confirm=confirm,
        )  # fmt: skip

    def _trim_to_target(self, scores: Scores, n: int, selection: Selection) -> Selection:
        """The selection that meets the target with the least excess. Candidates are compared unconfirmed, which is fast, and
        the best one is confirmed; if it fails, every candidate is."""
        best, used = self._search(scores, n, selection, confirm=False), scores
        if self._rounded:
            best, used = self._drop_unneeded_layers(best, scores)
        tried = self._select(used, best.requested)
        return tried if tried == best else self._search(scores, n, selection, confirm=True)

    def _drop_unneeded_layers(self, selection: Selection, scores: Scores) -> tuple[Selection, Scores]:
        """The selection without the layers that the target does not need, and the scores that give it. With `round_to` neurons
        are selected in rounded groups, and the last may make earlier ones unnecessary. The most important layers go first."""
        for layer in sorted(selection, key=lambda name: -float(scores[name][selection[name]].mean())):
            fewer = {name: values for name, values in scores.items() if name != layer}
            selectable = self._select(fewer, self.neurons.count, confirm=False)
            smaller = self._select(
                fewer, sum(len(selection[name]) for name in selection if name in selectable), confirm=False
            )
            if self._overshoots_less(smaller, selection):
                selection, scores = smaller, fewer
        return selection, scores

    def _overshoots_less(self, smaller: Selection, selection: Selection) -> bool:
        """Whether `smaller` meets the target with less excess than `selection`."""
        left, other = (self._fraction(self.neurons.preview(each)) for each in (smaller, selection))
        return other < left <= self.recipe.keep

    def _search(self, scores: Scores, n: int, selection: Selection, *, confirm: bool) -> Selection:
        """Bisect the number of neurons, then try the numbers just below: groups that do not fit are skipped, so a smaller
        number may free more."""
        low, high = 0, n
        while high - low > 1:
            middle = (low + high) // 2
            smaller = self._select(scores, middle, confirm=confirm)
            if self._fraction(self.neurons.preview(smaller)) <= self.recipe.keep:
                high, selection = middle, smaller
            else:
                low = middle
        fewer, smaller = high, selection
        for _ in range(1, SEARCH_BELOW):
            # with rounded groups, all numbers down to `smaller.taken` give the same selection
            fewer = (smaller.taken if self._rounded else fewer) - 1
            if fewer < 1:
                break
            smaller = self._select(scores, fewer, confirm=confirm)
            if self._overshoots_less(smaller, selection):
                selection = smaller
        return selection
