"""One round of pruning: score, choose, remove, and stop at the target to the neuron."""

import math
from collections.abc import Collection
from typing import Any

import torch

from hgnp.curvature.autodiff.rng import RandomState
from hgnp.curvature.step import State, Step
from hgnp.errors import InputError, named
from hgnp.pruning import Neurons, Preview, Scores, Selection
from hgnp.pruning.importance import WEIGHT_SCORES
from hgnp.recipe import Recipe
from hgnp.scoring import scored

LOOK_BELOW = 12
CRITERION = {"hgnp": "taylor", "taylor": "taylor", "hybrid": "taylor", "sam": "taylor"}
"""Method → what scores neurons; the other methods are named after their score."""


class Pruner:
    """Removes neurons from a network until what `recipe.target` counts is down to `recipe.keep`."""

    def __init__(
        self,
        neurons: Neurons,
        step: Step,
        state: State,
        recipe: Recipe,
        optimizer: torch.optim.Optimizer,
        at_start: Preview,
    ) -> None:
        self.neurons, self.recipe, self.optimizer = neurons, recipe, optimizer
        self.step, self.state = step, state
        self.at_start = at_start

    @property
    def left(self) -> float:
        """The fraction left of what the target counts."""
        return self._fraction(self.neurons.preview({}))

    def _fraction(self, preview: Preview) -> float:
        if self.recipe.target == "params":
            return preview.kept
        if self.recipe.target == "neurons":
            return preview.neurons / self.at_start.neurons if self.at_start.neurons else 1.0
        return preview.macs / self.at_start.macs if self.at_start.macs else 1.0

    def check_reachable(self) -> None:
        """One line, before any training, if the target asks for more than can go."""
        if self.recipe.keep >= 1:
            return
        if not self.neurons.count:
            raise InputError(
                f"keep must be 1 for this network, got {self.recipe.keep:g}: no neuron can be removed ({self._why_frozen()})"
            )
        able = self._scored_layers()
        alive = {layer.name: layer.alive for layer in self.neurons.layers}
        most = self._least({name: torch.zeros(alive[name]) for name in alive if name in able}, self.neurons.count)
        least = self._fraction(self.neurons.preview(most))
        if least > self.recipe.keep:
            frozen = sum(entry.count for entry in self.neurons.frozen)
            keeps = f"{self.recipe.floor}" if self.recipe.round_to == 1 else f"a multiple of {self.recipe.round_to}"
            if self.recipe.max_removed < 1:
                keeps += f" or {1 - self.recipe.max_removed:.1%} of its neurons, whichever is more"
            without = [name for name in alive if name not in able]
            unscored = sum(alive[name] for name in without)
            others = f", {unscored} neurons ({named(without)}) have no {self._criterion} score" if without else ""
            reachable = math.ceil(least * 1e4) / 1e4  # rounded to what can be met
            raise InputError(
                f"keep must be at least {reachable:g} of the {self.recipe.target}, got {self.recipe.keep:g}: every layer keeps "
                f"{keeps}{others} and {frozen} neurons are frozen (print(hgnp.Neurons(net, x)) says why)"
            )

    def _scored_layers(self) -> Collection[str]:
        """Those that the method has scores of: some have no norm's scale, or are read where no gate can sit."""
        if self._criterion not in WEIGHT_SCORES:
            return self.neurons.gates(self.recipe.coupling).rows
        with RandomState(*self.neurons.net.parameters()):
            return WEIGHT_SCORES[self._criterion](self.neurons)

    def _why_frozen(self) -> str:
        reasons: dict[str, list[str]] = {}
        for entry in self.neurons.frozen:
            reasons.setdefault(entry.reason, []).append(entry.name)
        why = "; ".join(f"{named(names)}: {reason}" for reason, names in reasons.items())
        return why or "it has no linear or convolutional layer"

    @property
    def _criterion(self) -> str:
        return CRITERION.get(self.recipe.method, self.recipe.method)

    def round(self, batches: list[tuple[Any, Any]]) -> int:
        """Removes the round's neurons, fewer if the target needs fewer, and says how many went: none once no more can go."""
        coupling = self.recipe.coupling
        mu = self.recipe.scoring_mu if self.recipe.uses_term(self.neurons.kept) else 0.0
        scores = scored(
            self.neurons, batches, self.step, self.state, mu=mu, coupling=coupling,
            criterion=self._criterion, graphs=self.recipe.execution != "eager",
        )  # fmt: skip
        n = min(self.recipe.neurons_per_round, self.neurons.count)
        cut = self._least(scores, n)
        while not cut and n < self.neurons.count:  # groups that are larger than a round
            n = min(2 * n, self.neurons.count)
            cut = self._least(scores, n)
        if not cut:
            return 0
        if self._fraction(self.neurons.preview(cut)) < self.recipe.keep:
            cut = self._just_enough(scores, n, cut)
        return self.neurons.remove(cut, self.optimizer).taken

    def _least(self, scores: Scores, n: int, *, confirm: bool = True) -> Selection:
        return self.neurons.least(
            scores, n, coupling=self.recipe.coupling, floor=self.recipe.floor,
            max_removed=self.recipe.max_removed, round_to=self.recipe.round_to, confirm=confirm,
        )  # fmt: skip

    def _just_enough(self, scores: Scores, n: int, cut: Selection) -> Selection:
        """A cut that meets the target and as little more as can be. Cuts are compared before they are tried, which is quick,
        and the best is tried; should it not fit, all of them are."""
        best, used = self._search(scores, n, cut, confirm=False), scores
        if self.recipe.round_to > 1:
            best, used = self._spare(best, scores)
        tried = self._least(used, best.requested)
        return tried if tried == best else self._search(scores, n, cut, confirm=True)

    def _spare(self, cut: Selection, scores: Scores) -> tuple[Selection, Scores]:
        """The cut, and the scores it is chosen by, without the layers that the others can do without: bundles are large, and
        the last may have made earlier ones needless. The most important are spared first."""
        for layer in sorted(cut, key=lambda name: -float(scores[name][cut[name]].mean())):
            fewer = {name: values for name, values in scores.items() if name != layer}
            able = self._least(fewer, self.neurons.count, confirm=False)
            smaller = self._least(fewer, sum(len(cut[name]) for name in cut if name in able), confirm=False)
            if self._nearer(smaller, cut):
                cut, scores = smaller, fewer
        return cut, scores

    def _nearer(self, smaller: Selection, cut: Selection) -> bool:
        """Whether a cut meets the target, and with less than another."""
        left, other = (self._fraction(self.neurons.preview(each)) for each in (smaller, cut))
        return other < left <= self.recipe.keep

    def _search(self, scores: Scores, n: int, cut: Selection, *, confirm: bool) -> Selection:
        """Bisection on the number of neurons, then a look at the numbers just below, as what no longer fits is skipped and a
        smaller number may free more."""
        low, high = 0, n
        while high - low > 1:
            middle = (low + high) // 2
            smaller = self._least(scores, middle, confirm=confirm)
            if self._fraction(self.neurons.preview(smaller)) <= self.recipe.keep:
                high, cut = middle, smaller
            else:
                low = middle
        fewer, smaller = high, cut
        for _ in range(1, LOOK_BELOW):
            # with bundles, all numbers down to what a cut takes give that same cut
            fewer = (fewer if self.recipe.round_to == 1 else smaller.taken) - 1
            if fewer < 1:
                break
            smaller = self._least(scores, fewer, confirm=confirm)
            if self._nearer(smaller, cut):
                cut = smaller
        return cut
