"""The step of a run, by its recipe."""

from torch import nn

from hgnp.baselines.sam import SAMStep
from hgnp.curvature.step import State, Step, make_step
from hgnp.recipe import Recipe
from hgnp.training.task import Task


def make_steps(net: nn.Module, task: Task, recipe: Recipe) -> tuple[Step, Step, State]:
    """The step that trains, the one that scores, and their state: the same step, unless the method trains by one of its own."""
    bundle, choices = recipe.flatness_choices
    recipe = recipe.resolved()
    assert recipe.refresh_every is not None
    assert recipe.skip_inactive is not None
    step, state = make_step(
        net,
        loss=task.loss,
        mu=recipe.training_mu,
        bound=recipe.bound,
        output=task.output,
        flatness=bundle,
        refresh_every=recipe.refresh_every,
        skip_inactive=recipe.skip_inactive,
        **choices,
    )
    if recipe.method == "sam":
        return SAMStep(net, loss=task.loss, rho=recipe.rho, output=task.output), step, state
    return step, step, state
