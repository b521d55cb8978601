"""One's own loop: it resumes as the page shows, and may have several optimizers."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hgnp

RESUMING = re.compile(r"### Resuming your own loop\n.*?```python\n(.*?)```.*?```python\n(.*?)```", re.DOTALL)


def test_ones_own_loop_resumes_as_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training continues bit by bit as without the interruption."""
    found = RESUMING.search((Path(__file__).parents[1] / "docs" / "neurons.md").read_text(encoding="utf-8"))
    assert found is not None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint").mkdir()

    class MyNet(nn.Sequential):
        def __init__(self) -> None:
            torch.manual_seed(0)
            super().__init__(
                nn.Linear(4, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)
            )

    x, y = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3
    names = {"hgnp": hgnp, "torch": torch, "MyNet": MyNet, "example_input": x[:2]}

    def rounds(names: dict[str, Any], count: int) -> None:
        net, neurons, flat, optimizer = (names[name] for name in ("net", "neurons", "flat", "optimizer"))
        for _ in range(count):
            neurons.remove(neurons.least(hgnp.sensitivity(net, neurons, [(x, y)], flatness=flat), 2), optimizer)
            for _ in range(3):
                optimizer.zero_grad()
                flat.backward(x, y)
                optimizer.step()

    net = MyNet()
    names |= {"net": net, "neurons": hgnp.Neurons(net, x[:2]), "flat": hgnp.Flatness(net, mu=1e-3, bound=0.5)}
    names["optimizer"] = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    rounds(names, 2)
    exec(found[1], names)  # noqa: S102  the repository's own text
    rounds(names, 2)
    resumed = {name: names[name] for name in ("hgnp", "torch", "MyNet", "example_input")}
    exec(found[2], resumed)  # noqa: S102
    rounds(resumed, 2)
    assert resumed["neurons"].kept == names["neurons"].kept < 0.6
    for name, tensor in names["net"].state_dict().items():
        assert torch.equal(resumed["net"].state_dict()[name], tensor)


def test_the_state_of_several_optimizers_is_cut() -> None:
    """As with one optimizer of two parameter groups."""
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3))
    two = copy.deepcopy(one)
    matrices, biases = [p for p in two.parameters() if p.dim() == 2], [p for p in two.parameters() if p.dim() == 1]
    joint = torch.optim.SGD(
        [{"params": [p for p in one.parameters() if p.dim() == dims]} for dims in (2, 1)], lr=0.1, momentum=0.9
    )
    several = [torch.optim.SGD(params, lr=0.1, momentum=0.9) for params in (matrices, biases)]
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    for net, optimizers in ((one, [joint]), (two, several)):
        neurons = hgnp.Neurons(net, x)
        for number in range(4):
            if number == 2:
                neurons.remove({"0": [1, 4]}, joint if net is one else several)
            net.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
    for mine, its in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(mine, its)
