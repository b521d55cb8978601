"""Running again what is behind a block gives what a second pass gives, or is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvature_cases import gradients
from hgnp import Flatness
from hgnp.curvature.blocks import find_blocks
from hgnp.curvature.spectrum import Chosen
from hgnp.curvature.tape import Tape


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


class Net(nn.Module):
    """A residual network whose ways of writing in place, drawing or hiding an operation can be chosen."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.a, self.na = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.b, self.nb = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.c, self.nc = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.na(self.a(x)), inplace=self.way != "plain")
        main, side = self.nb(self.b(x)), self.nc(self.c(x))
        if self.way == "drawn":
            side = F.dropout(side, 0.5, self.training)
        if self.way == "hidden":
            side = Twice.apply(side)
        if self.way == "written":
            main += side
        else:
            main = main + side
        return self.out(F.relu(main).mean((2, 3)))


def trained(way: str, block: str, choices: dict[str, Any]) -> tuple[Any, ...]:
    torch.manual_seed(0)
    net = Net(way).double()
    flat = Flatness(net, mu=1.0, bound=-1.0, v_from="this_batch", **choices)
    x, y = torch.randn(6, 2, 5, 5).double(), torch.randint(0, 3, (6,))
    flat.prepare(x, y)
    flat.v.chosen = Chosen.known(next(each for each in find_blocks(net) if each.name == block))
    loss = flat.step(x, y, renew=False)
    return loss, flat.curvature, gradients(net), dict(net.named_buffers()), torch.rand(1)


REPEATS = {"plain": "abc", "in place": "abc", "written": "ab", "drawn": "", "hidden": ""}


@pytest.mark.parametrize("choices", [{}, {"curvature": "hessian"}, {"scaling": "scale_invariant"}])
@pytest.mark.parametrize("block", ["a", "b", "c", "out"])
@pytest.mark.parametrize("way", REPEATS)
def test_it_is_what_a_second_pass_gives(way: str, block: str, choices: dict[str, Any], monkeypatch: Any) -> None:
    if way == "hidden" and (block != "out" and not choices.get("curvature")):
        pytest.skip("the tangent is lost in either way, and the block refused")
    found: list[bool] = []
    again = Tape.again

    def watched(self: Tape, *args: Any) -> Tensor | None:
        z = again(self, *args)
        found.append(z is not None)
        return z

    monkeypatch.setattr(Tape, "again", watched)
    have = trained(way, block, choices)
    monkeypatch.setattr(Tape, "again", lambda *_: None)
    want = trained(way, block, choices)
    torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-12)
    expected = block in REPEATS[way] or (block == "out" and way not in ("drawn", "hidden"))
    assert found == ([] if way == "drawn" else [expected])
