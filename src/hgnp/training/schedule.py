"""The learning rate over a run whose length is not known when it starts.

How many rounds it takes to reach the target depends on which neurons go. The *position* p goes from 0 to 1 over the run: an
epoch moves it by (1 − p)/r, r being the epochs that are left by the present estimate. It never goes back, is linear where the
estimate is right, and is 1 at the end whatever happened, because the number of fine-tuning epochs is known.
"""

import math

from hgnp.recipe import Recipe

ONE_CYCLE_RISE = 0.3
ONE_CYCLE_START = 1 / 25


def factor(recipe: Recipe, position: float) -> float:
    """What the peak learning rate is multiplied by."""
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
    """Rounds of pruning until `left` (the fraction that the target counts) is down to `recipe.keep`.

    Parameters and MACs fall as a power of the neurons, about the second; the power is read off what has gone so far.
    """
    if not neurons:  # none is left to go: only a round can find that out
        return 1
    share = neurons / at_start
    power = 1.0 if recipe.target == "neurons" else 2.0
    if share < 0.99 and 0 < left < 0.99:
        power = max(math.log(left) / math.log(share), 0.5)
    return max(
        math.ceil((share - recipe.keep ** (1 / power)) * at_start / max(recipe.neurons_per_round, recipe.round_to)), 1
    )
