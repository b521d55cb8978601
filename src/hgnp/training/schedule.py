"""Learning-rate schedules for a run whose length is not known in advance.

The number of rounds until the target is met depends on which neurons are removed. The *position* p rises from 0 to 1 over the
run: each epoch adds (1 − p)/r, where r is the current estimate of the epochs left. p never decreases, is linear where the
estimate is right, and is exactly 1 at the end, because the number of fine-tuning epochs is known.
"""

import math

from hgnp.pruning.limits import values_of
from hgnp.recipe import Recipe

ONE_CYCLE_RISE = 0.3
ONE_CYCLE_START = 1 / 25


def factor(recipe: Recipe, position: float) -> float:
    """The factor on the peak learning rate."""
    if recipe.schedule == "steps":
        return recipe.lr_factor ** sum(position >= step for step in recipe.lr_steps)
    if recipe.schedule == "cosine":
        return _cosine(1.0, recipe.lr_final, position)
    if recipe.schedule == "one_cycle":
        if position < ONE_CYCLE_RISE:
            return ONE_CYCLE_START + (1 - ONE_CYCLE_START) * position / ONE_CYCLE_RISE
        return _cosine(1.0, recipe.lr_final, (position - ONE_CYCLE_RISE) / (1 - ONE_CYCLE_RISE))
    return 1.0


def _cosine(start: float, end: float, position: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(position, 1.0))) / 2


def rounds_left(recipe: Recipe, *, left: float, neurons: int, at_start: int) -> int:
    """Estimated rounds of pruning until `left`, the fraction of the target's quantity, is at most `recipe.keep`.

    Parameters and MACs fall as a power of the number of neurons, about the second; the exponent is fitted to the removals so
    far.
    """
    if not neurons:  # none is left to remove: the next round ends the pruning
        return 1
    share = neurons / at_start
    power = 1.0 if recipe.target == "neurons" else 2.0
    if share < 0.99 and 0 < left < 0.99:
        power = max(math.log(left) / math.log(share), 0.5)
    per_round = max(recipe.neurons_per_round, *values_of(recipe.round_to))
    return max(math.ceil((share - recipe.keep ** (1 / power)) * at_start / per_round), 1)
