"""The penalty in one of k steps, with k times the weight."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hgnp
from curvature_cases import convnet, gradients, images
from hgnp import Flatness
from hgnp.errors import InputError
from train_cases import loaders, made, recipe

MU, BOUND = 0.2, 0.01


def dense_gradient(net: nn.Module, v: dict[str, Tensor], x: Tensor, y: Tensor, weight: float) -> dict[str, Tensor]:
    """∇(C + weight·(q − B)) by forward mode through the whole network and the softmax's own Hessian, along this v."""
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    along = {name: v.get(name, torch.zeros_like(p)) for name, p in parameters.items()}

    def total(parameters: dict[str, Tensor]) -> Tensor:
        z, u = torch.func.jvp(lambda at: torch.func.functional_call(net, at, (x,)), (parameters,), (along,))
        p = z.softmax(1)
        q = (p * u * u).sum(1).mean() - (p * u).sum(1).square().mean()
        return F.cross_entropy(z, y) + weight * (q - BOUND)

    return torch.func.grad(total)(parameters)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("choices", "by"),
    [
        ({"direction_over": "network"}, "backward"),
        ({"direction_over": "network"}, "loss"),
        ({"refresh_every": 2}, "backward"),
        ({"refresh_every": 2}, "loss"),
        ({"direction_from": "this_batch"}, "backward"),
    ],
)
def test_one_of_three_steps_has_the_penalty_three_times(choices: dict[str, Any], by: str) -> None:
    net = convnet("none")
    flat = Flatness(net, mu=MU, bound=BOUND, penalty_every=3, **choices)
    plain, pairs = [], []
    for step in range(9):
        x, y = images(5 + step % 2)
        net.zero_grad()
        if by == "backward":
            flat.backward(x, y)
        else:
            flat.loss(x, y).backward()
        penalized = step % 3 == 0
        assert not penalized or flat.curvature > BOUND
        expected = dense_gradient(net, flat.direction, x, y, 3 * MU if penalized else 0.0)
        torch.testing.assert_close(gradients(net), expected, rtol=1e-8, atol=1e-10)
        plain.append(not penalized)
        pairs.append(copy.deepcopy(flat.state_dict()["pairs"]))
        with torch.no_grad():
            for p in net.parameters():
                p.sub_(0.05 * p.grad)
    for step in range(1, 9):  # only steps with the penalty refresh v
        kept = all(
            torch.equal(pairs[step][n][key], pairs[step - 1][n][key]) for n in pairs[step] for key in pairs[step][n]
        )
        assert kept is (plain[step] or (choices.get("refresh_every") == 2 and step == 6))


def test_the_count_survives_a_checkpoint_and_a_removal() -> None:
    ours, theirs = convnet("batch"), convnet("batch")
    options: dict[str, Any] = {"mu": MU, "bound": -1.0, "penalty_every": 4, "direction_over": "network"}
    flats = [Flatness(net, **options) for net in (ours, theirs)]
    counts = []
    for step in range(7):
        for flat in flats:
            flat.net.zero_grad()
            flat.backward(*images(6))
        torch.testing.assert_close(gradients(ours), gradients(theirs), rtol=0, atol=0)
        fresh = Flatness(theirs, **options)
        fresh.load_state_dict(flats[1].state_dict())
        counts.append(fresh.state_dict()["since_penalty"])
        flats[1] = fresh
        if step == 1:
            for net in (ours, theirs):
                hgnp.Neurons(net, images(2)[0]).remove({"0": [1]})
    assert counts == [1, 2, 3, 0, 1, 2, 3]


def test_a_run_trains_with_it_and_reports_what_was_added_to_the_loss() -> None:
    given = recipe(keep=1.0, mu=0.01, bound=0.0, warmup_epochs=2, finetune_epochs=0, penalty_every=3)
    seen: list[tuple[float, float]] = []
    steps: list[int] = []

    def on_step(run: Any) -> None:
        seen.append((run.flatness.curvature, run.flatness.mu))
        steps.append(run.flatness.state_dict()["since_penalty"])

    history = hgnp.prune(made(), *loaders(), recipe=given, on_step=on_step).history
    per_epoch = len(seen) // 2
    penalized = [each for each, after in zip(seen[:per_epoch], steps, strict=False) if after == 1]
    assert steps == [(step + 1) % 3 for step in range(len(steps))]
    assert history[0]["penalty"] == pytest.approx(sum(3 * mu * q for q, mu in penalized) / per_epoch)
    assert history[0]["active"] == 1.0


@pytest.mark.parametrize("every", [0, -1, 1.5, True, None])
def test_what_is_no_number_of_steps_is_refused(every: Any) -> None:
    with pytest.raises(InputError, match="penalty_every must be an integer ≥ 1, got"):
        Flatness(convnet(), penalty_every=every)
    with pytest.raises(InputError, match="penalty_every must be an integer ≥ 1, got"):
        hgnp.Recipe(keep=0.5, penalty_every=every)


def test_v_over_the_network_is_refreshed_in_every_step_that_has_the_penalty() -> None:
    recipe = hgnp.Recipe(keep=0.5, penalty_every=4, flatness={"direction_over": "network"})
    assert recipe.resolved().refresh_every == 1
