"""`Recipe`: defaults, the values that replace None, help() and fields with fixed values."""

import dataclasses
import inspect
import json
import pydoc
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch

import hgnp
from hgnp.curvature.sharpness import Sharpness
from hgnp.result import NetworkStats, Snapshot, Target
from hgnp.training.task import CallbackState
from train_cases import loaders, made, recipe


@pytest.mark.parametrize(
    ("given", "refresh_every", "skip_inactive"),
    [
        ({}, 8, True),
        ({"flatness": "paper"}, 1, False),
        ({"flatness": {"direction_from": "this_batch"}}, 1, False),
        ({"flatness": {"flatness": "paper", "direction_from": "last_batch"}}, 8, True),
        ({"refresh_every": 3, "skip_inactive": False}, 3, False),
    ],
)
def test_the_penalty_is_cheap_while_inactive_unless_the_recipe_or_the_papers_order_says_otherwise(
    given: dict[str, object], refresh_every: int, skip_inactive: bool
) -> None:
    resolved = hgnp.Recipe(keep=0.5, **given).resolved()  # type: ignore[arg-type]
    assert (resolved.refresh_every, resolved.skip_inactive) == (refresh_every, skip_inactive)
    assert resolved.resolved() == resolved


def test_the_learning_rate_is_annealed_over_the_fine_tuning_by_default() -> None:
    history = hgnp.prune(made(), *loaders(), recipe=hgnp.Recipe(keep=0.5, warmup_epochs=1, finetune_epochs=3)).history
    rates = [row["lr"] for row in history]
    assert rates[:-3] == [0.05] * (len(rates) - 3)
    assert 0.05 > rates[-3] > rates[-2] > rates[-1] > 0


def test_a_scheduler_of_the_users_replaces_the_default_schedule(tmp_path: Path) -> None:
    def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    mine = hgnp.Recipe(keep=1.0, warmup_epochs=2, finetune_epochs=0)
    result = hgnp.prune(made(), *loaders(), recipe=mine, scheduler=halving, out=tmp_path / "run")
    assert [row["lr"] for row in result.history] == [0.05 / 2, 0.05 / 4]
    used = json.loads((tmp_path / "run/run.json").read_text())["recipe"]
    assert (used["schedule"], used["refresh_every"]) == ("constant", 8)
    with pytest.raises(ValueError, match="schedule must be None or 'constant' with a scheduler, got 'cosine'"):
        hgnp.prune(made(), *loaders(), recipe=recipe(schedule="cosine"), scheduler=halving)


def explained(text: str, name: str) -> bool:
    """Whether `help()` has an entry "name: Words." in a section of its own."""
    return re.search(rf"^[ |]+{name}: \S.{{15,}}", text, re.MULTILINE) is not None


@pytest.mark.parametrize("cls", [hgnp.Recipe, hgnp.Result, NetworkStats, Snapshot, Target, Sharpness, CallbackState])
def test_help_explains_every_field(cls: Any) -> None:
    text = pydoc.render_doc(cls, renderer=pydoc.plaintext)
    section = text[text.index("Attributes:") : text.index("Methods defined here")]
    assert [field.name for field in dataclasses.fields(cls) if not explained(section, field.name)] == []


@pytest.mark.parametrize(
    "function",
    [
        hgnp.prune, hgnp.Flatness.backward, hgnp.Flatness.loss, hgnp.Flatness.objective, hgnp.Flatness.load_state_dict,
        hgnp.Neurons.load_state_dict, hgnp.Neurons.gates, hgnp.Neurons.least, hgnp.Recipe.uses_penalty, hgnp.sensitivity,
        hgnp.sharpness, hgnp.recalibrate, hgnp.save, hgnp.load, hgnp.export,
    ],
    ids=lambda function: function.__qualname__,
)  # fmt: skip
def test_help_explains_every_argument(function: Any) -> None:
    text = pydoc.render_doc(function, renderer=pydoc.plaintext)
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    assert [name for name in names if not explained(text[text.index("Args:") :], name)] == []


def test_an_unknown_field_is_refused_with_the_closest_name() -> None:
    with pytest.raises(
        hgnp.HgnpError, match=r"^Recipe: option must be a known one, got 'kepe'; did you mean keep\?$"
    ) as error:
        hgnp.Recipe(kepe=0.1)  # type: ignore[call-arg]
    assert isinstance(error.value, TypeError)


def test_fields_are_given_by_name_or_in_a_mapping() -> None:
    with pytest.raises(TypeError, match=r"^Recipe: options must be given by name, got one without; use keep=0.5$"):
        hgnp.Recipe(0.5)  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"^recipe must be a mapping of field names to values, got list$"):
        hgnp.Recipe.from_dict([1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr_steps": (0.5, 0.5)}, "lr_steps must be a list of rising fractions > 0 and < 1, got"),
        ({"nesterov": True, "momentum": 0.0}, "momentum must be > 0 with nesterov=True, got 0"),
        (
            {"flatness": "paper", "refresh_every": 4},
            "refresh_every must be 1 with direction_from='this_batch', .* got 4",
        ),
        ({"flatness": "paper", "skip_inactive": True}, "skip_inactive must be False with .*'this_batch', .* got True"),
    ],
)
def test_fields_that_exclude_each_other_are_refused_on_construction(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hgnp.Recipe(keep=0.5, **given)


def test_numbers_of_numpy_become_pythons() -> None:
    mine = hgnp.Recipe(
        keep=np.float32(0.5), neurons_per_round=np.int64(5), snapshots=[np.float64(0.75)], floor={"*": np.int32(2)}
    )  # type: ignore[arg-type]
    assert mine == hgnp.Recipe(keep=0.5, neurons_per_round=5, snapshots=(0.75,), floor={"*": 2})
    assert hgnp.Recipe.from_dict(json.loads(json.dumps(mine.as_dict()))) == mine
    assert type(mine.keep) is float
    for wrong in (np.float32(5), np.bool_(True)):
        with pytest.raises(ValueError, match="neurons_per_round must be an integer ≥ 1, got"):
            hgnp.Recipe(keep=0.5, neurons_per_round=wrong)  # type: ignore[arg-type]


def test_equal_recipes_have_one_hash() -> None:
    one, other = (hgnp.Recipe(keep=keep, flatness={"curvature": "hessian"}, floor={"*": 2}) for keep in (1, 1.0))
    assert len({one, other}) == 1
    assert len({one, hgnp.Recipe(keep=0.5)}) == 2


def test_prune_has_public_arguments_alone() -> None:
    head = pydoc.render_doc(hgnp.prune, renderer=pydoc.plaintext).split("Train `net`")[0]
    assert "recipe: " in head
    assert not any(name.startswith("_") for name in inspect.signature(hgnp.prune).parameters)


def test_fields_with_fixed_values_take_those_of_their_type_alone() -> None:
    fixed = {}
    for name, hint in get_type_hints(hgnp.Recipe).items():
        for kind in (hint, *get_args(hint)):
            if get_origin(kind) is Literal:
                fixed[name] = get_args(kind)
    assert fixed.pop("flatness") == ("default", "paper")  # or a mapping of choices
    assert set(fixed) == {
        "target", "method", "prune_unit", "coupling", "schedule", "anneal", "scheduler_interval", "precision", "execution",
        "measure",
    }  # fmt: skip
    for name, values in fixed.items():
        for value in values:
            needed = {"threshold": 0.5} if value == "hybrid" else {}
            assert getattr(recipe(**{name: value}, **needed), name) == value
        for wrong in ("other", 1, ["auto"], {}):
            with pytest.raises(ValueError, match=rf"{name} must be .*{values[0]!r}.*{values[-1]!r}, got "):
                recipe(**{name: wrong})
