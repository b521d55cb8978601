"""Multiply–accumulates: recurrent layers, and what comes after the point where tracing stops."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hgnp import Neurons, Recipe, prune
from hgnp.errors import InputError
from hgnp.pruning.macs import measured_macs
from pruning_cases import random_scores


def counted(net: nn.Module, *inputs: Any) -> int:
    """By PyTorch's own counter, which knows no recurrent layers."""
    net.eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(*inputs)
    return int(counter.get_total_flops() // 2)


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.first, self.rnn = nn.Linear(6, 8), kind(8, 5, batch_first=True, **options)
        self.out = nn.Linear(5 * (1 + self.rnn.bidirectional), 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(self.first(x).relu())[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_counted(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    net, (samples, steps) = Tagger(kind, **options), (2, 7)
    weights = [p for name, p in net.rnn.named_parameters() if name.startswith("weight")]
    expected = samples * steps * (6 * 8 + sum(p.numel() for p in weights) + net.out.weight.numel())
    x = torch.randn(samples, steps, 6)
    assert Neurons(net, x).macs == expected
    assert measured_macs(net, net, ((x,), {})) == expected


def test_a_bilinear_layer_and_products_with_vectors_are_counted() -> None:
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.pair = nn.Linear(4, 5), nn.Linear(4, 6), nn.Bilinear(5, 6, 3)
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.pair(self.a(x), self.b(x))
            return torch.addmv(torch.zeros(len(x)), y, self.weight) + torch.dot(self.weight, self.weight)

    net, x = Products(), torch.randn(2, 4)
    expected = 2 * (4 * 5 + 4 * 6 + 5 * 6 * 3 + 3) + 3
    assert Neurons(net, x).macs == measured_macs(net, net, ((x,), {})) == expected


class Branching(nn.Module):
    """Tracing stops at a decision on data; the layers after it have most of the MACs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 24)
        self.wide, self.out = nn.Linear(24, 128), nn.Linear(128, 5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu())
        self.calls += 1
        x = x[x.abs().amax(1) > 0]
        return self.out(F.relu(self.wide(x)))  # type: ignore[no-any-return]


def test_what_comes_after_tracing_stops_is_counted() -> None:
    net, x = Branching(), torch.randn(8, 16)
    neurons = Neurons(net, x)
    assert neurons.macs == counted(net, x)
    net.calls.zero_()
    neurons = Neurons(net, x)
    assert not net.calls  # nothing is left of the pass that counts
    selection = neurons.least(random_scores(neurons), 20)
    assert selection.taken == 20
    preview = neurons.preview(selection)
    neurons.remove(selection)
    assert neurons.macs == preview.macs == counted(net, x)


def test_a_target_of_macs_counts_what_comes_after_tracing_stops() -> None:
    net, data = Branching(), [(torch.randn(8, 16), torch.arange(8) % 5)] * 2
    full = counted(net, data[0][0])
    recipe = Recipe(keep=0.2, target="macs", warmup_epochs=1, neurons_per_round=8, finetune_epochs=0, measure="none")
    with pytest.raises(InputError, match=r"keep must be at least 0.59\d+ of the macs, got 0.2"):
        prune(net, data, recipe=recipe, verbose=False)
    recipe = Recipe(keep=0.8, target="macs", warmup_epochs=1, neurons_per_round=8, finetune_epochs=0, measure="none")
    result = prune(net, data, recipe=recipe, verbose=False)
    assert result.target.got == pytest.approx(counted(net, data[0][0]) / full)
    assert result.target.got <= 0.8


CONVOLUTIONS = nn.Sequential(
    nn.Conv2d(3, 6, 3, groups=3), nn.ReLU(), nn.ConvTranspose2d(6, 4, 3, stride=2), nn.Flatten(), nn.LazyLinear(5)
)
NETS: dict[str, tuple[nn.Module, Tensor]] = {
    "convolutions": (CONVOLUTIONS, torch.randn(2, 3, 8, 8)),
    "transformer": (nn.TransformerEncoderLayer(12, 3, 20, batch_first=True), torch.randn(2, 5, 12)),
}


@pytest.mark.parametrize("name", NETS)
def test_traces_and_passes_on_data_count_alike(name: str) -> None:
    net, x = NETS[name]
    net(x)
    assert Neurons(net, x).macs == measured_macs(net, net, ((x,), {})) > 0
