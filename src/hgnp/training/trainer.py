"""What leaves the gradient in a run, by its recipe."""

from torch import nn

from hgnp.baselines import SAM
from hgnp.flatness import Flatness
from hgnp.recipe import Recipe
from hgnp.training.task import Task


def make_flatness(net: nn.Module, task: Task, recipe: Recipe) -> Flatness:
    bundle, choices = recipe.flatness_choices
    recipe = recipe.resolved()
    assert recipe.refresh_every is not None
    assert recipe.skip_inactive is not None
    return Flatness(
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


def make_trainer(flatness: Flatness, task: Task, recipe: Recipe) -> Flatness | SAM:
    """Whose `backward` is a step's: that of `flatness`, unless the method has one of its own."""
    if recipe.method == "sam":
        return SAM(flatness.net, loss=task.loss, rho=recipe.rho, output=task.output)
    return flatness
