"""Tracing finds every output and leaves the network, its caches and all global state as they were."""

import os
import signal
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import hgnp
from cases import conv
from hgnp import Neurons
from hgnp.pruning import structure, trace
from pruning_cases import IMAGES, VECTORS, prunable_layers, random_scores, two_layers

REACHED: list[str] = []


class Interrupted(nn.Module):
    """Ctrl-C arrives during the forward pass."""

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


def test_ctrl_c_is_deferred_to_the_end_of_a_trace() -> None:
    # inside an operator on fake tensors it would make PyTorch abort the process
    net, before = Interrupted(), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        hgnp.Neurons(net, torch.randn(2, 4))
    assert signal.getsignal(signal.SIGINT) is before
    assert REACHED == ["middle", "end"]
    assert all(type(p) is nn.Parameter for p in net.parameters())


def test_tracing_works_outside_the_main_thread() -> None:
    counts: list[int] = []
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    thread = threading.Thread(target=lambda: counts.append(hgnp.Neurons(net, torch.randn(2, 4)).count))
    thread.start()
    thread.join()
    assert counts == [6]


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.na = nn.Conv2d(3, 9, 3, padding=1, bias=False), nn.BatchNorm2d(9)
        self.b, self.nb = nn.Conv2d(9, 9, 3, padding=1, bias=False), nn.BatchNorm2d(9)
        self.out = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.na(self.a(x)))
        return self.out(nn.functional.adaptive_avg_pool2d(torch.relu(self.nb(self.b(x)) + x), 1).flatten(1))


@pytest.mark.parametrize(("side", "samples"), [(6, 2), (1, 1)])  # one value per channel: norms in evaluation mode
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_trace_of_a_verified_cut_is_reused_after_the_removal(
    side: int, samples: int, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net, x = Added().to(memory_format=layout), torch.randn(samples, 3, side, side)
    neurons = hgnp.Neurons(net, x)
    traces: list[bool] = []
    trace_forward = structure.trace_forward

    def counted(*args: Any, **options: Any) -> Any:
        traces.append(True)
        return trace_forward(*args, **options)

    monkeypatch.setattr(structure, "trace_forward", counted)
    for _ in range(2):
        scores = {layer.name: torch.rand(layer.alive) for layer in neurons.layers}
        traces.clear()
        neurons.remove(neurons.least(scores, 4, coupling="paper"))
        assert len(traces) == 4  # the cut and a sample of the next cuts, in two modes each
        anew = hgnp.Neurons(net, x)
        scores = random_scores(anew)
        assert all(
            neurons.least(scores, n, confirm=False) == anew.least(scores, n, confirm=False) for n in range(anew.count)
        )
        assert (neurons.layers, neurons.frozen, neurons.macs) == (
            tuple(hgnp.pruning.Layer(layer.name, layer.alive, 9) for layer in anew.layers),
            anew.frozen,
            anew.macs,
        )


class OwnDict(dict[str, Any]):
    pass


class OwnList(list[Any]):
    pass


@dataclass(slots=True)
class Slotted:
    y: Tensor


@pytest.mark.parametrize(
    "container", [lambda y: OwnDict(y=y), lambda y: OwnList([y]), Slotted], ids=["dict", "list", "slots"]
)
def test_outputs_are_found_in_any_container(container: Any) -> None:
    assert prunable_layers(two_layers(lambda n, x: container(n.out(n.a(x).tanh())))) == ["a"]


def test_an_output_without_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="the network must return tensors, got NoneType"):
        Neurons(two_layers(lambda n, x: None), VECTORS)


def test_tracing_restores_the_caches_of_the_network() -> None:
    def forward(n: Any, x: Tensor) -> Tensor:
        if len(x) not in n.cache:
            n.cache[len(x)] = torch.arange(len(x), dtype=x.dtype)[:, None]
        h = n.a(x)
        n.history.append(h)
        return n.out(h.tanh() + n.cache[len(x)] * 0)  # type: ignore[no-any-return]

    net = two_layers(forward)
    net.cache, net.history = {}, []  # type: ignore[assignment]
    neurons = Neurons(net, VECTORS)
    neurons.remove({"a": [0]})
    assert net.cache == {}
    assert net.history == []
    assert not isinstance(net(VECTORS), FakeTensor)


def test_a_hook_that_keeps_fake_tensors_is_warned_of() -> None:
    kept: list[Tensor] = []
    net = two_layers(lambda n, x: n.out(n.a(x).tanh()))
    handle = net.a.register_forward_hook(lambda module, args, output: kept.append(output))  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match="kept fake tensors of the traced forward pass"):
        Neurons(net, VECTORS)
    handle.remove()


def test_tracing_works_in_several_threads_at_once() -> None:
    def work(place: int) -> None:
        net = nn.Sequential(
            conv(3, 6), nn.BatchNorm2d(6), nn.ReLU(), conv(6, 6), nn.Flatten(), nn.Linear(216, 2)
        ).double()
        found[place] = prunable_layers(net, IMAGES)

    found: dict[int, list[str]] = {}
    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(3)] == [["0", "3"]] * 3


def test_tracing_works_in_inference_mode() -> None:
    net = two_layers(lambda n, x: n.out(n.a(x).tanh()))
    with torch.inference_mode():
        assert prunable_layers(net) == ["a"]


def test_tracing_leaves_the_counter_of_a_cumulative_batch_norm() -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, momentum=None), nn.ReLU(), nn.Linear(6, 2)).double()
    assert prunable_layers(net) == ["0"]
    assert int(net[1].num_batches_tracked) == 0


def test_tracing_leaves_the_random_number_generator() -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 2)).double().train()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    Neurons(net, VECTORS).remove({"0": [1]})
    assert torch.equal(torch.rand(3), expected)


def test_a_batch_of_one_can_be_traced_through_batch_norm() -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).double()
    assert prunable_layers(net, VECTORS[:1]) == ["0"]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 3))


def test_removals_do_not_fill_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_CACHED_SHAPES", 10)  # more are created
    model, x, y = mlp(), torch.randn(6, 4), torch.arange(6) % 3
    neurons = hgnp.Neurons(model, x)
    FakeTensorMode.cache_clear()
    trace._FRESH_RESULTS.clear()
    sizes, keys = [], set[Any]()
    for _ in range(20):
        neurons.remove(neurons.least(hgnp.sensitivity(model, neurons, [(x, y)]), 2))
        sizes += [FakeTensorMode.cache_info().size, len(trace._FRESH_RESULTS)]
        keys |= trace._FRESH_RESULTS.keys()
    assert max(sizes) <= 10 < len(keys)


CONVOLUTIONS: list[dict[str, Any]] = [
    {}, {"stride": 2}, {"padding": 1}, {"stride": 2, "padding": 1}, {"dilation": 2}, {"dilation": (1, 2)}, {"bias": False},
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_results_that_are_looked_up_are_those_of_the_network(dtype: torch.dtype, form: torch.memory_format) -> None:
    """Convolutions that differ in one setting, on inputs of the same shape, and sums that are broadcast: traced twice, and in
    each memory format after the other."""
    x = torch.randn(2, 4, 9, 9, dtype=dtype)
    for _ in range(2):
        for number, options in enumerate(CONVOLUTIONS):
            net = nn.Conv2d(4, 4, 3, **options).to(dtype)
            net = net.to(memory_format=form if number % 2 else torch.contiguous_format)  # type: ignore[call-overload]
            for training in (False, True):
                graph = trace.trace_forward(net, ((x,), {}), training=training)
                assert graph.error is None
                assert graph.values[graph.outputs[0]].shape == net(x).shape

    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.b = nn.Conv2d(4, 4, 3), nn.Parameter(torch.zeros(4, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return (F.gelu(self.conv(x)).relu() + self.b).view(2, -1)

    net, last = Viewed().to(dtype), Viewed().to(dtype).to(memory_format=torch.channels_last)
    for _ in range(2):
        assert trace.trace_forward(net, ((x,), {}), training=False).error is None
        assert "view" in str(trace.trace_forward(last, ((x,), {}), training=False).error)


@pytest.mark.parametrize(
    ("bias", "weight", "inputs"), [((6,), (6, 5), (2, 4)), ((5,), (6, 4), (2, 4)), ((6,), (6, 4), (3, 2, 5))]
)
def test_a_linear_layer_that_does_not_fit_fails_in_traces_too(
    bias: tuple[int, ...], weight: tuple[int, ...], inputs: tuple[int, ...]
) -> None:
    net = two_layers(lambda n, x: F.linear(x, n.own_weight, n.own_bias))
    net.own_weight, net.own_bias = nn.Parameter(torch.zeros(weight)), nn.Parameter(torch.zeros(bias))
    with pytest.raises(RuntimeError):
        net(torch.zeros(inputs))
    assert isinstance(trace.trace_forward(net, ((torch.zeros(inputs),), {}), training=False).error, RuntimeError)


@pytest.mark.parametrize("bias", [(1,), (2, 1), (2, 6), (6,), ()])
def test_a_bias_that_is_broadcast_gives_the_shape_of_the_product(bias: tuple[int, ...]) -> None:
    net = two_layers(lambda n, x: torch.addmm(n.own_bias, x, n.own_weight))
    net.own_weight, net.own_bias = nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.zeros(bias))
    graph = trace.trace_forward(net, ((torch.zeros(2, 4),), {}), training=False)
    assert graph.values[graph.outputs[0]].shape == net(torch.zeros(2, 4)).shape == (2, 6)


def test_transforms_of_torch_func_freeze_everything_with_the_reason() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(lambda row: self.b(self.a(row).relu()))(x)  # type: ignore[no-any-return]

    neurons = Neurons(Rows(), torch.randn(4, 5))
    assert neurons.count == 0
    assert all("it calls transforms of torch.func, such as vmap" in frozen.reason for frozen in neurons.frozen)
