"""The interface that both executors have."""

import contextlib

import pytest
import torch

from graphed_cases import Net, stand_in
from hgnp.curvature.step import make_step
from hgnp.execution.executor import make_executor


@pytest.mark.parametrize("graphs", [False, True])
def test_an_executor_trains_by_its_interface_alone(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    torch.manual_seed(0)
    net, x, y = Net().double(), torch.randn(12, 3, 6, 6).double(), torch.randint(0, 5, (12,))
    executor = make_executor(*make_step(net, mu=0.05, bound=-1.0), contextlib.nullcontext, graphs=graphs)
    assert executor.uses_graphs is graphs
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    executor.begin_epoch()
    executor.zero_grad()
    before = [p.detach().clone() for p in net.parameters()]
    expected = torch.nn.functional.cross_entropy(net(x), y).item()
    assert executor.backward(x, y).item() == pytest.approx(expected, rel=1e-12)
    grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    executor.optimizer_step(optimizer)
    for p, was, grad in zip(net.parameters(), before, grads, strict=True):
        torch.testing.assert_close(p.detach(), was - 0.05 * grad, rtol=1e-12, atol=1e-14)
