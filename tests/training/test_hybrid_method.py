"""A run that switches: Taylor above the threshold κ, HGNP at and below it."""

import itertools
from typing import Any

import pytest
import torch

import hgnp
from hgnp.recipe import Recipe
from hgnp.training.run_state import RunState
from train_cases import Net, loaders, made, recipe

STRONG: dict[str, Any] = {"mu": 0.3, "bound": -1.0}  # always penalised, and strongly enough to be seen at once


def run(**given: Any) -> tuple[Net, list[dict[str, Any]]]:
    net = made()
    history = hgnp.prune(net, *loaders(), recipe=recipe(**STRONG | given)).history
    return net, [{name: value for name, value in row.items() if "seconds" not in name} for row in history]


def same(one: tuple[Net, Any], other: tuple[Net, Any]) -> bool:
    states = zip(one[0].state_dict().values(), other[0].state_dict().values(), strict=True)
    return one[1] == other[1] and all(torch.equal(a, b) for a, b in states)


@pytest.mark.parametrize("unit", ["epochs", "steps"])
def test_the_hybrid_is_hgnp_at_threshold_1_and_taylor_at_0(unit: str) -> None:
    rounds = {"prune_unit": unit, "prune_every": 1 if unit == "epochs" else 4}
    pure = {method: run(method=method, **rounds) for method in ("hgnp", "taylor")}
    assert same(run(method="hybrid", threshold=1.0, **rounds), pure["hgnp"])
    assert same(run(method="hybrid", threshold=0, **rounds), pure["taylor"])
    assert not same(pure["hgnp"], pure["taylor"])


def test_the_hybrid_is_bit_equal_to_taylor_until_the_threshold_and_uses_the_penalty_afterwards() -> None:
    _, taylor = run(method="taylor")
    levels = sorted({row["kept"] for row in taylor}, reverse=True)
    threshold = levels[2]  # after the second round: a network at the threshold itself is HGNP's
    _, hybrid = run(method="hybrid", threshold=threshold)
    at = next(number for number, row in enumerate(hybrid) if row["kept"] <= threshold)
    assert hybrid[:at] == taylor[:at]
    assert [row["mu"] for row in hybrid] == [0.0] * at + [0.3] * (len(hybrid) - at)
    assert [row["radius"] is not None for row in hybrid] == [False] * at + [True] * (len(hybrid) - at)
    assert hybrid[at]["widths"] == taylor[at]["widths"]  # chosen before the switch
    assert hybrid[at]["loss"] != taylor[at]["loss"]
    assert hybrid[at]["penalty"] > 0


def test_scores_have_the_penalty_from_the_round_after_the_switch_on() -> None:
    """With the penalty in the scores alone, networks part only where HGNP's scores choose other neurons than Taylor's."""
    alone = {"mu": 0.0, "score_mu": 10.0}
    _, taylor = run(method="taylor")
    threshold = sorted({row["kept"] for row in taylor}, reverse=True)[1]
    _, hybrid = run(method="hybrid", threshold=threshold, **alone)
    switch = next(number for number, row in enumerate(hybrid) if row["kept"] <= threshold)
    assert hybrid[: switch + 1] == taylor[: switch + 1]
    assert hybrid[switch + 1]["removed"] > 0
    assert hybrid[switch + 1]["widths"] != taylor[switch + 1]["widths"]


def test_the_hybrid_switches_in_the_middle_of_an_epoch() -> None:
    by_steps = {"prune_unit": "steps", "prune_every": 2, "neurons_per_round": 2}
    _, taylor = run(method="taylor", **by_steps)
    whole = [row["kept"] for row in taylor]
    threshold = (whole[2] + whole[3]) / 2  # met between the ends of two epochs
    _, hybrid = run(method="hybrid", threshold=threshold, **by_steps)
    assert hybrid[:3] == taylor[:3]
    assert whole[3] < threshold < whole[2]
    assert (hybrid[2]["mu"], hybrid[3]["mu"]) == (0.0, 0.3)
    assert hybrid[3]["penalty"] > 0
    assert hybrid[3]["loss"] != taylor[3]["loss"]


def test_mu_warms_up_from_the_switch_on() -> None:
    plan = RunState(Recipe(keep=0.1, method="hybrid", threshold=0.5, mu=0.8, mu_warmup_epochs=4))
    assert plan.mu(0.0) == 0.0
    plan.epoch = 10
    plan.update_switch(0.6)
    assert plan.mu(0.5) == 0.0
    plan.update_switch(0.5)
    assert [plan.mu(0.0), plan.mu(0.5)] == pytest.approx([0.0, 0.1])
    plan.epoch = 12
    plan.update_switch(0.4)
    assert plan.mu(0.0) == pytest.approx(0.4)
    plan.epoch = 14
    assert plan.mu(0.0) == 0.8


def test_kappa_counts_parameters_whatever_the_target() -> None:
    _, rows = run(method="hybrid", threshold=0.6, target="neurons", keep=0.5)
    assert all((row["mu"] > 0) == (row["kept"] <= 0.6) for row in rows)
    assert {row["mu"] for row in rows} == {0.0, 0.3}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "hybrid"}, "threshold must be a fraction from 0 to 1 with method 'hybrid', got None"),
        ({"method": "hgnp", "threshold": 0.5}, "threshold must be None with method 'hgnp', got 0.5; only 'hybrid' switches"),
        *(({"method": "hybrid", "threshold": value}, "threshold") for value in (-0.1, 48, float("nan"), True, "fit")),
    ],
)  # fmt: skip
def test_invalid_thresholds_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(**given)


def test_uses_penalty_follows_method_and_threshold() -> None:
    for kept, threshold in itertools.product((1.0, 0.5, 0.1), (0.0, 0.5, 1.0)):
        assert recipe(method="hybrid", threshold=threshold).uses_penalty(kept) == (kept <= threshold)
        assert recipe(method="hgnp").uses_penalty(kept)
        assert not recipe(method="taylor").uses_penalty(kept)
