"""What may happen while a network is recorded."""

import os
import signal
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hgnp
from hgnp.pruning import structure

REACHED: list[str] = []


class Interrupted(nn.Module):
    """Ctrl-C comes in the middle of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        REACHED.append("middle")
        os.kill(os.getpid(), signal.SIGINT)
        x = self.b(torch.relu(x))
        REACHED.append("end")
        return x


def test_ctrl_c_waits_for_the_end_of_a_recording() -> None:
    # in the middle of a fake tensor's operation it would make PyTorch abort the process
    net, before = Interrupted(), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        hgnp.Neurons(net, torch.randn(2, 4))
    assert signal.getsignal(signal.SIGINT) is before
    assert REACHED == ["middle", "end"]
    assert all(type(p) is nn.Parameter for p in net.parameters())


def test_recording_in_a_thread_leaves_signals_alone() -> None:
    made: list[int] = []
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    thread = threading.Thread(target=lambda: made.append(hgnp.Neurons(net, torch.randn(2, 4)).count))
    thread.start()
    thread.join()
    assert made == [6]


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.na = nn.Conv2d(3, 9, 3, padding=1, bias=False), nn.BatchNorm2d(9)
        self.b, self.nb = nn.Conv2d(9, 9, 3, padding=1, bias=False), nn.BatchNorm2d(9)
        self.out = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.na(self.a(x)))
        return self.out(nn.functional.adaptive_avg_pool2d(torch.relu(self.nb(self.b(x)) + x), 1).flatten(1))


@pytest.mark.parametrize(("side", "samples"), [(6, 2), (1, 1)])  # the second: one value a channel, norms keep quiet
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_what_a_cut_was_tried_with_stands_for_a_recording_after_it(
    side: int, samples: int, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net, x = Added().to(memory_format=layout), torch.randn(samples, 3, side, side)
    neurons = hgnp.Neurons(net, x)
    recorded: list[bool] = []
    record = structure.record

    def counted(*args: Any, **options: Any) -> Any:
        recorded.append(True)
        return record(*args, **options)

    monkeypatch.setattr(structure, "record", counted)
    for _ in range(2):
        scores = {layer.name: torch.rand(layer.alive) for layer in neurons.layers}
        recorded.clear()
        neurons.remove(neurons.least(scores, 4, coupling="paper"))
        assert len(recorded) == 4  # the cut, and a sample of the next ones, in two modes each
        anew = hgnp.Neurons(net, x)
        assert torch.equal(neurons._structure.roots, anew._structure.roots)
        assert torch.equal(neurons._structure.fixed, anew._structure.fixed)
        assert (neurons.layers, neurons.frozen, neurons.macs) == (
            tuple(hgnp.pruning.Layer(layer.name, layer.alive, 9) for layer in anew.layers),
            anew.frozen,
            anew.macs,
        )
