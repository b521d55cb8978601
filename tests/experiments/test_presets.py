"""What comes with hgnp: presets that can be read, and the paper's figures in them."""

import pytest

from hgnp.experiments import presets
from hgnp.experiments.build import prepare
from hgnp.recipe import Recipe

PAIRS = ("alexnet-flowers", "resnet18-cifar10", "resnet18-birds", "vgg16-cifar10")


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_has_a_line_about_it_and_recipes_that_hold(name: str) -> None:
    config = presets.preset(name)
    assert config.name == name
    assert config.about
    Recipe.from_dict(config.recipe)
    for method in config.methods:
        Recipe.from_dict(config.with_method(method).recipe)


def test_the_demo_comes_first_and_all_are_there() -> None:
    names = presets.names()
    assert names[0] == "demo"
    ablations = {"alexnet-flowers-no-training-term", "alexnet-flowers-no-scoring-term"}
    assert set(names) == {"demo", *PAIRS, *(f"{pair}-short" for pair in PAIRS), *ablations}


@pytest.mark.parametrize(
    ("name", "batch", "lr", "decay", "warmup", "finetune"),
    [
        ("alexnet-flowers", 32, 1e-3, 1e-4, 5, 50),
        ("resnet18-cifar10", 128, 0.1, 5e-4, 50, 20),
        ("resnet18-birds", 32, 1e-3, 1e-4, 25, 20),
        ("vgg16-cifar10", 128, 0.1, 5e-4, 50, 20),
    ],
)
def test_the_papers_hyperparameters(name: str, batch: int, lr: float, decay: float, warmup: int, finetune: int) -> None:
    config = presets.preset(name)
    recipe = Recipe.from_dict(config.recipe)
    assert config.data_args["batch"] == batch
    assert (recipe.lr, recipe.weight_decay, recipe.momentum) == (lr, decay, 0.9)
    assert (recipe.warmup_epochs, recipe.prune_every, recipe.finetune_epochs) == (warmup, 5, finetune)
    assert (recipe.neurons_per_round, recipe.mu, recipe.bound) == (100, 1e-3, 0.5)


def test_the_papers_taylor_baselines() -> None:
    flowers = Recipe.from_dict(presets.preset("alexnet-flowers").with_method("taylor").recipe)
    assert (flowers.warmup_epochs, flowers.prune_every, flowers.prune_unit) == (20, 30, "steps")
    birds = Recipe.from_dict(presets.preset("resnet18-birds").with_method("taylor").recipe)
    assert (birds.warmup_epochs, birds.prune_every, birds.prune_unit, birds.lr) == (60, 1, "epochs", 0.01)
    assert flowers.neurons_per_round == birds.neurons_per_round == 1


def test_the_ablations_leave_out_one_term_each() -> None:
    training = Recipe.from_dict(presets.preset("alexnet-flowers-no-training-term").recipe)
    scoring = Recipe.from_dict(presets.preset("alexnet-flowers-no-scoring-term").recipe)
    assert (training.training_mu, training.scoring_mu) == (0, 1e-3)
    assert (scoring.training_mu, scoring.scoring_mu) == (1e-3, 0)


def test_short_versions_say_so() -> None:
    assert all((presets.preset(f"{pair}-short").about or "").startswith("SHORT") for pair in PAIRS)


def test_an_unknown_preset_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match="there is no preset 'vgg-cifar10'; did you mean vgg16-cifar10"):
        presets.text("vgg-cifar10")


@pytest.mark.parametrize("name", [name for name in presets.names() if name != "demo"])
def test_a_preset_that_needs_data_says_how_to_give_them(name: str) -> None:
    with pytest.raises(ValueError, match=r"data_args: .* needs 'folder'; --data DIR gives it"):
        prepare(presets.preset(name))
