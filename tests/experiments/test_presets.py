"""What comes with hgnp: presets that can be read, and the paper's figures in them."""

import pytest
import torch
from torch import nn

from hgnp.experiments import presets
from hgnp.experiments.build import network, prepare
from hgnp.experiments.config import extended, parse
from hgnp.recipe import Recipe

PAIRS = ("alexnet-flowers", "resnet18-cifar10", "resnet18-birds", "vgg16-cifar10")
ABLATIONS = ("alexnet-flowers-no-training-penalty", "alexnet-flowers-no-scoring-penalty")


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
    literal = {*PAIRS, *ABLATIONS}
    assert set(names) == {
        "demo", *literal, *(f"{name}-fast" for name in literal), *(f"{pair}-short" for pair in PAIRS),
        *(f"{net}-cifar10-best{ending}" for net in ("vgg16", "resnet18") for ending in ("", "-dense", "-narrow")),
    }  # fmt: skip


@pytest.mark.parametrize("net", ["vgg16", "resnet18"])
def test_the_best_presets_stand_beside_a_dense_and_a_narrow_network_trained_alike(net: str) -> None:
    """As many epochs, up to the rounds of pruning, whose number depends on what is removed; about as many MACs."""
    best, dense, narrow = (presets.preset(f"{net}-cifar10-best{ending}") for ending in ("", "-dense", "-narrow"))
    recipes = [Recipe.from_dict(each.recipe) for each in (best, dense, narrow)]
    assert recipes[1] == recipes[2]
    assert recipes[1].keep == 1
    assert recipes[0].round_to == 8
    assert recipes[1].floor == recipes[1].round_to == 1
    rounds = recipes[1].finetune_epochs - recipes[0].warmup_epochs - recipes[0].finetune_epochs
    assert 25 <= rounds <= 35
    shared = {"lr", "nesterov", "weight_decay", "momentum", "schedule", "method"}
    assert all(getattr(recipes[0], name) == getattr(recipes[1], name) for name in shared)
    cutout = {"cutout": 16} if net == "vgg16" else {}
    assert best.data_args == dense.data_args == narrow.data_args == {"batch": 128, "crop": 4, **cutout}
    assert best.loss_args == dense.loss_args == {"label_smoothing": 0.1}
    with torch.device("meta"):
        assert 0.19 < macs(network(narrow)) / macs(network(dense)) < 0.2


def macs(net: nn.Module) -> int:
    """Of an image of 32 px."""
    found = []
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(lambda m, _, out: found.append(m.weight.numel() * out[0, 0].numel()))
    net(torch.zeros(2, 3, 32, 32))
    return sum(found)


@pytest.mark.parametrize(
    ("name", "batch", "lr", "decay", "warmup", "finetune"),
    [
        ("alexnet-flowers", 32, 1e-3, 1e-4, 5, 50),
        ("resnet18-cifar10", 128, 0.1, 5e-4, 50, 20),
        ("resnet18-birds", 32, 1e-3, 1e-4, 25, 20),
        ("vgg16-cifar10", 128, 0.1, 5e-4, 50, 20),
    ],
)
@pytest.mark.parametrize("ending", ["", "-fast"])
def test_the_papers_hyperparameters(
    name: str, batch: int, lr: float, decay: float, warmup: int, finetune: int, ending: str
) -> None:
    config = presets.preset(name + ending)
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


def test_the_ablations_leave_out_the_penalty_in_one_place_each() -> None:
    training = Recipe.from_dict(presets.preset("alexnet-flowers-no-training-penalty").recipe)
    scoring = Recipe.from_dict(presets.preset("alexnet-flowers-no-scoring-penalty").recipe)
    assert (training.training_mu, training.scoring_mu) == (0, 1e-3)
    assert (scoring.training_mu, scoring.scoring_mu) == (1e-3, 0)


def test_short_and_fast_versions_say_so() -> None:
    assert all((presets.preset(f"{pair}-short").about or "").startswith("SHORT") for pair in PAIRS)
    abouts = [presets.preset(f"{name}-fast").about or "" for name in (*PAIRS, *ABLATIONS)]
    assert all(about.startswith("Faster variant of ") for about in abouts)


@pytest.mark.parametrize("name", [*PAIRS, *ABLATIONS])
def test_the_papers_experiments_are_literal_and_fast_ones_differ_in_the_penalty_alone(name: str) -> None:
    literal, fast = presets.preset(name), presets.preset(f"{name}-fast")
    recipe = Recipe.from_dict(literal.recipe)
    assert (recipe.flatness, recipe.refresh_every, recipe.skip_inactive) == ("paper", 1, False)
    assert recipe.coupling == ("paper" if name.startswith("resnet") else "coupled")
    penalty = {"flatness", "refresh_every", "skip_inactive"}
    differ = {key for key, value in recipe.as_dict().items() if Recipe.from_dict(fast.recipe).as_dict()[key] != value}
    assert differ == penalty
    assert {**fast.as_dict(), "recipe": 0, "name": 0, "about": 0} == {
        **literal.as_dict(), "recipe": 0, "name": 0, "about": 0
    }  # fmt: skip


def test_images_are_augmented_as_the_paper_says() -> None:
    """Flips on CIFAR-10 and Flowers, the readers' own default; on Birds none are named, and images are cropped."""
    birds = presets.preset("resnet18-birds").data_args
    assert (birds["side"], birds["resize"], birds["flip"]) == (160, False, False)
    assert not {"crop", "flip"} & presets.preset("vgg16-cifar10").data_args.keys()


def test_the_text_of_a_preset_that_extends_another_is_whole() -> None:
    text = presets.text("vgg16-cifar10-fast")
    assert "extends" not in text
    assert parse(text, where="here", name="x") == presets.preset("vgg16-cifar10-fast")
    assert presets.text("vgg16-cifar10").startswith("about")  # as written, with its comments


def test_an_unknown_preset_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match="preset must be a known one, got 'vgg-cifar10'; did you mean vgg16-cifar10"):
        presets.text("vgg-cifar10")


@pytest.mark.parametrize("name", [name for name in presets.names() if name != "demo"])
def test_a_preset_that_needs_data_says_how_to_give_them(name: str) -> None:
    with pytest.raises(ValueError, match=r"data_args must have 'folder' for .*; pass --data DIR"):
        prepare(presets.preset(name))


def test_own_keys_replace_those_of_what_is_extended_in_mappings_one_by_one() -> None:
    base = {"model": "A", "recipe": {"mu": 1, "flatness": {"ranking": "kfac"}}, "methods": {"taylor": {}}, "seed": 3}
    own = {"model": "B", "recipe": {"flatness": "paper"}, "methods": None}
    assert extended(base, own) == {
        "model": "B", "recipe": {"mu": 1, "flatness": "paper"}, "methods": None, "seed": 3
    }  # fmt: skip
    assert base["recipe"] == {"mu": 1, "flatness": {"ranking": "kfac"}}
