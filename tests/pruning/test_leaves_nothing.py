"""What scoring and removing, again and again, must not leave behind."""

import gc

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hgnp
from hgnp import removal
from hgnp.pruning import trace


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 3))


def test_scores_without_a_flatness_leave_no_listener_behind() -> None:
    model, x, y = net(), torch.randn(6, 4), torch.arange(6) % 3
    neurons, flat = hgnp.Neurons(model, x), hgnp.Flatness(model)
    listening = removal.listeners_of(model)
    for _ in range(5):
        hgnp.sensitivity(model, neurons, [(x, y)])
    gc.collect()
    assert listening
    assert removal.listeners_of(model) == listening
    del listening
    neurons.remove({"0": [0]})
    del flat
    gc.collect()
    assert not removal.listeners_of(model)


def test_rounds_do_not_fill_pytorch_s_cache_of_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST_CACHED", 300)  # 1990 are made below
    model, x, y = net(), torch.randn(6, 4), torch.arange(6) % 3
    neurons = hgnp.Neurons(model, x)
    FakeTensorMode.cache_clear()
    sizes = []
    while neurons.count > 20:
        neurons.remove(neurons.least(hgnp.sensitivity(model, neurons, [(x, y)]), 1))
        sizes.append(FakeTensorMode.cache_info().size)
    assert max(sizes) <= 300
