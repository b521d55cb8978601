"""Stand-ins for CUDA graphs in tests of the engine: work that is done again at every replay."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

import hgnp
from hgnp.execution.captured import Versions
from hgnp.execution.graphed import Engine


class Again:
    """Does the work at every replay, in the state that it was captured in, into the memory of the first time."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.engine: Engine = Stand.engine
        flat = self.engine.flatness
        assert flat is not None
        self.flat, self.work, self.chosen = flat, work, flat.v.chosen
        kept = [tensor.clone() for tensor in self._state()]
        self.made = work()
        self.seen, self.next = flat.seen, flat.v.chosen
        with _unsafe_preserve_version_counter(tuple(self._state())):
            for tensor, value in zip(self._state(), kept, strict=True):
                tensor.copy_(value)

    def _state(self) -> list[Tensor]:
        return [*self.engine.net.buffers(), *self.engine._memory, *self.engine._grads.values()]

    def replay(self) -> None:
        flat, net = self.flat, self.engine.net
        held = flat.seen, flat.v.chosen, [p.grad for p in net.parameters()]
        flat.weight, flat.v.chosen, flat.v.pairs = self.engine._mu, self.chosen, self.engine._static
        net.zero_grad(set_to_none=True)
        loss = self.work()
        if self.made is not None:
            self.made.copy_(loss)
        for captured in self.engine._graphs.values():
            if captured.graph is self and captured.first is not None:  # a replay fills it in place; this is a new one
                vars(flat.first).update(kept=True)
                vars(captured).update(first=flat.first, versions=Versions((), ()))
        if flat.seen is not held[0]:
            for name in ("radius", "residuals", "curvature"):
                getattr(self.seen, name).copy_(getattr(flat.seen, name))
        if flat.v.chosen is not self.chosen:
            self.next.index.number.copy_(flat.v.chosen.index.number)
        flat.weight, flat.v.pairs = None, self.engine._static
        flat.seen, flat.v.chosen = held[:2]
        for parameter, grad in zip(net.parameters(), held[2], strict=True):
            parameter.grad = grad


class Stand:
    """In place of `Capture`."""

    engine: Engine

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def capture(self, work: Callable[[], Any]) -> tuple[Again, Any]:
        made = Again(work)
        return made, made.made

    def forget(self) -> None:
        pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.na = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.b, self.nb = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.na(self.a(x)))
        return self.out(torch.relu(self.nb(self.b(x)) + x).mean((2, 3)))


def prepared(net: nn.Module, mu: float = 0.05, **choices: Any) -> tuple[hgnp.Flatness, Engine, torch.optim.SGD]:
    flat = hgnp.Flatness(net, mu=mu, **choices)
    Stand.engine = engine = Engine(flat)
    return flat, engine, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
