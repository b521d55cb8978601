"""What `sensitivity` refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hgnp


def test_bad_input_is_one_line() -> None:
    net, other = (nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)) for _ in range(2))
    x, y = torch.randn(5, 4), torch.arange(5) % 3
    neurons = hgnp.Neurons(net, x)
    pairs: Any = [(x, y)]
    wrong: list[tuple[str, Any, dict[str, Any]]] = [
        ("batches: one of them is no pair", (x, y), {}),
        ("batches: one of them is no pair", [(x, y, y)], {}),
        ("batches: one of them is no pair", [{"x": x, "labels": y}], {}),
        ("batches: one of them is no pair", [(x[:0], y[:0])], {}),
        ("batches: one of them is no pair", [(x.numpy(), y.numpy())], {}),
        ("batches: a int was given", 5, {}),
        ("batches: there is none", [], {}),
        ("criterion: 'tailor' was given", pairs, {"criterion": "tailor"}),
        ("coupling: 'x' was given; 'coupled' or 'paper'", pairs, {"coupling": "x"}),
        ("mu: -1 was given", pairs, {"mu": -1}),
        ("criterion: .'l1'. was given", pairs, {"criterion": ["l1"]}),
        ("flatness: a str was given", pairs, {"flatness": "paper"}),
        ("flatness: it was made for another network", pairs, {"flatness": hgnp.Flatness(other)}),
    ]
    for message, batches, given in wrong:
        with pytest.raises((TypeError, ValueError), match=message):
            hgnp.sensitivity(net, neurons, batches, **given)
    with pytest.raises(ValueError, match="neurons: it was made for another network"):
        hgnp.sensitivity(net, hgnp.Neurons(other, x), pairs)
    with pytest.raises(TypeError, match="neurons: a Linear was given"):
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
        ("checkpoint", "net: a part of it is checkpointed in evaluation mode"),
    ],
)
def test_a_part_that_loses_the_derivative_is_refused(how: str, message: str) -> None:
    net, (x, y) = Within(how).double(), (torch.randn(6, 4).double(), torch.arange(6) % 3)
    neurons = hgnp.Neurons(net, x)
    with pytest.raises(ValueError, match=message):
        hgnp.sensitivity(net, neurons, [(x, y)])
    if how != "checkpoint":  # what has no gate can be left without a derivative
        assert hgnp.sensitivity(net, hgnp.Neurons(net, x, protect=["a"]), [(x, y)]).keys() == {"b"}
