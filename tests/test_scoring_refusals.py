"""What `sensitivity` refuses."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hgnp
from hgnp.flatness import step_and_state


def test_sensitivity_refuses_bad_input_in_one_line() -> None:
    net, other = (nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)) for _ in range(2))
    x, y = torch.randn(5, 4), torch.arange(5) % 3
    neurons = hgnp.Neurons(net, x)
    pairs: Any = [(x, y)]
    wrong: list[tuple[str, Any, dict[str, Any]]] = [
        ("batches must be .* pairs with samples", (x, y), {}),
        ("batches must be .* pairs with samples", [(x, y, y)], {}),
        ("batches must be .* pairs with samples", [{"x": x, "labels": y}], {}),
        ("batches must be .* pairs with samples", [(x[:0], y[:0])], {}),
        ("batches must be .* pairs with samples", [(x.numpy(), y.numpy())], {}),
        ("batches must be a list of .inputs, target. pairs, got int", 5, {}),
        ("batches must have at least one", [], {}),
        ("batches: labels must be from 0 to 2, as the network has 3 outputs, got 9", [(x, y), (x, y * 0 + 9)], {}),
        ("net must take every batch of batches, but its forward failed in 0: ", [(x[:, :2], y)], {}),
        (r"loss must take every batch of batches, .* and target \(NoneType\), but failed: ", [(x, None)], {}),
        ("output must take what net returns, a Tensor, but failed: Attr", pairs, {"output": lambda o: o.logits}),
        ("criterion must be one of .*, got 'tailor'", pairs, {"criterion": "tailor"}),
        ("coupling must be 'coupled' or 'paper', got 'x'", pairs, {"coupling": "x"}),
        ("mu must be a finite number ≥ 0, got -1", pairs, {"mu": -1}),
        ("mu must be a finite number ≥ 0, got True", pairs, {"mu": True, "flatness": hgnp.Flatness(net)}),
        ("flatness must be given with mu, got None", pairs, {"mu": 0.1}),
        ("criterion must be one of .*, got .'l1'.", pairs, {"criterion": ["l1"]}),
        ("flatness must be a hgnp.Flatness of net, got str", pairs, {"flatness": "paper"}),
        (
            "loss must be that of flatness, which is used, got .*; omit loss",
            pairs,
            {"flatness": hgnp.Flatness(net), "loss": F.mse_loss},
        ),
        ("flatness must be of the same network as net", pairs, {"flatness": hgnp.Flatness(other)}),
    ]
    for message, batches, given in wrong:
        with pytest.raises((TypeError, ValueError), match=message):
            hgnp.sensitivity(net, neurons, batches, **given)
    own = hgnp.Flatness(net, loss=nn.CrossEntropyLoss(label_smoothing=0.1))
    hgnp.sensitivity(net, neurons, pairs, flatness=own, loss=step_and_state(own)[0].loss)
    with pytest.raises(ValueError, match="neurons must be of the same network as net"):
        hgnp.sensitivity(net, hgnp.Neurons(other, x), pairs)
    with pytest.raises(TypeError, match=r"neurons must be a hgnp.Neurons of net, got Linear"):
        hgnp.sensitivity(net, net[0], pairs)  # type: ignore[arg-type]


class Within(nn.Module):
    """One layer runs inside something that loses the derivative by its gate."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.out, self.how = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3), how

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        if self.how == "no_grad":
            with torch.no_grad():
                x = torch.tanh(self.b(x))
        else:
            x = checkpoint(lambda h: torch.tanh(self.b(h)), x, use_reentrant=self.how == "reentrant")
        return self.out(x)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no_grad", "b must run with gradients while neurons are scored"),
        ("reentrant", "b must run with gradients while neurons are scored"),
        ("checkpoint", "net must run without activation checkpointing in evaluation mode"),
    ],
)
def test_a_part_that_loses_the_derivative_is_refused(how: str, message: str) -> None:
    net, (x, y) = Within(how).double(), (torch.randn(6, 4).double(), torch.arange(6) % 3)
    neurons = hgnp.Neurons(net, x)
    with pytest.raises(ValueError, match=message):
        hgnp.sensitivity(net, neurons, [(x, y)])
    if how != "checkpoint":  # what has no gate can be left without a derivative
        assert hgnp.sensitivity(net, hgnp.Neurons(net, x, protect=["a"]), [(x, y)]).keys() == {"b"}
