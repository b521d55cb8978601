"""The state of a run, against simulated runs of a network whose parameters fall as the square of its neurons."""

import itertools
import math
from typing import Any

import pytest

from hgnp import Recipe
from hgnp.training.run_state import RunState

START, STEPS = 1000, 7


def played(recipe: Recipe) -> tuple[list[int], list[float]]:
    """Epochs left by the plan's estimate, and the position at the end, of every epoch."""
    plan, neurons = RunState(recipe), START
    estimates, positions = [], []

    def prune() -> None:
        nonlocal neurons
        neurons = max(neurons - recipe.neurons_per_round, math.floor(recipe.keep**0.5 * START + 1e-9))
        plan.last_round = plan.epoch
        if (neurons / START) ** 2 <= recipe.keep:
            plan.pruning_ended = plan.epoch

    while True:
        plan.mark_target_met((neurons / START) ** 2)
        if plan.done:
            return estimates, positions
        if plan.round_due:
            prune()
        left = plan.epochs_left(left=(neurons / START) ** 2, neurons=neurons, at_start=START, steps=STEPS)
        estimates.append(left)
        plan.advance(left)
        for _ in range(STEPS if recipe.prune_unit == "steps" and plan.pruning else 0):
            if plan.pruning_ended is None and plan.steps % recipe.prune_every == 0:
                prune()
            plan.steps += plan.pruning_ended is None
        positions.append(plan.position)
        plan.epoch += 1


@pytest.mark.parametrize("unit", ["epochs", "steps"])
@pytest.mark.parametrize("anneal", ["run", "finetune"])
def test_estimates_are_right_and_the_position_is_linear(unit: str, anneal: str) -> None:
    for keep, warmup, every, n, finetune in itertools.product(
        (1.0, 0.5, 0.1), (0, 1, 3, 5), (1, 3, 5), (50, 333), (0, 1, 7)
    ):
        given: dict[str, Any] = {
            "keep": keep,
            "warmup_epochs": warmup,
            "prune_every": every,
            "finetune_epochs": finetune,
        }
        estimates, positions = played(Recipe(neurons_per_round=n, prune_unit=unit, anneal=anneal, **given))
        epochs = len(positions)
        assert estimates == list(range(epochs, 0, -1)), given
        if anneal == "run":
            assert positions == pytest.approx([(epoch + 1) / epochs for epoch in range(epochs)]), given
        else:
            expected = [0.0] * (epochs - finetune) + [(epoch + 1) / finetune for epoch in range(finetune)]
            assert positions == pytest.approx(expected), given
        if positions and (anneal == "run" or finetune):
            assert positions[-1] == 1.0


@pytest.mark.parametrize("neurons", [0, 1])
@pytest.mark.parametrize("target", ["params", "neurons"])
def test_the_length_of_a_run_without_removable_neurons_is_still_estimated(neurons: int, target: str) -> None:
    """All that is left may be frozen, above the target."""
    plan = RunState(Recipe(keep=0.1, warmup_epochs=0, finetune_epochs=2, target=target))
    assert plan.epochs_left(left=0.5, neurons=neurons, at_start=50, steps=None) == 1 + 2
