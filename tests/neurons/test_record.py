"""What may happen while a network is recorded."""

import os
import signal
import threading

import pytest
import torch
from torch import Tensor, nn

import hgnp

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
