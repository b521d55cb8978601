"""Removal touches exactly what it must: tensors, gradients, optimizer state, attributes; and all of it or nothing."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hgnp
from cases import CASES, conv
from hgnp import Neurons, Removal


def net_and_neurons(**options: Any) -> tuple[nn.Sequential, Neurons]:
    torch.manual_seed(0)
    net = nn.Sequential(conv(3, 6), nn.BatchNorm2d(6), nn.ReLU(), conv(6, 5), nn.Flatten(), nn.Linear(320, 4))
    return net, Neurons(net, torch.zeros(2, 3, 8, 8), **options)


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def loss() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = net(torch.randn(4, 3, 8, 8)).pow(2).mean()
        value.backward()
        return value

    optimizer.step(loss)  # type: ignore[arg-type]


def test_rows_columns_norms_statistics_and_gradients() -> None:
    net, neurons = net_and_neurons()
    net(torch.randn(4, 3, 8, 8)).sum().backward()
    before = copy.deepcopy(net)
    grads = {name: p.grad for name, p in before.named_parameters()}
    for name, parameter in net.named_parameters():
        grads[name] = parameter.grad.clone()  # type: ignore[union-attr]
    assert neurons.remove({"0": [1, 4]}) == {"0": [1, 4]}
    stay = [0, 2, 3, 5]
    expected = {
        "0.weight": lambda t: t[stay], "0.bias": lambda t: t[stay], "1.weight": lambda t: t[stay], "1.bias": lambda t: t[stay],
        "1.running_mean": lambda t: t[stay], "1.running_var": lambda t: t[stay], "3.weight": lambda t: t[:, stay],
    }  # fmt: skip
    for name, tensor in before.state_dict().items():
        assert torch.equal(net.state_dict()[name], expected.get(name, lambda t: t)(tensor)), name
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter.grad, expected.get(name, lambda t: t)(grads[name])), name  # type: ignore[arg-type]
    assert (net[0].out_channels, net[1].num_features, net[3].in_channels) == (4, 4, 4)
    assert neurons.version == 1


def test_a_flattened_channel_takes_all_its_columns() -> None:
    net, neurons = net_and_neurons()
    before = net[5].weight.detach().clone()
    neurons.remove({"3": [1]})
    assert torch.equal(net[5].weight, before.unflatten(1, (5, 64))[:, [0, 2, 3, 4]].flatten(1))
    assert net[5].in_features == 256


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "Adam with amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_goes_on(make: Any) -> None:
    net, neurons = net_and_neurons()
    optimizer = make(net.parameters())
    step(net, optimizer)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    before = copy.deepcopy(optimizer.state_dict()["state"])
    neurons.remove({"0": [1, 4], "3": [0]}, optimizer)
    assert held == [id(p) for p in net.parameters()]
    row = next(iter(before.values()), {})
    after = optimizer.state_dict()["state"].get(0, {})
    for key, value in row.items():
        if isinstance(value, Tensor) and value.dim() == 4 and value.shape[0] == 6:
            assert torch.equal(after[key], value[[0, 2, 3, 5]])
    weights = [net[i].weight.detach().clone() for i in (0, 1, 3, 5)]
    step(net, optimizer)
    step(net, optimizer)
    assert all(not torch.equal(net[i].weight, w) for i, w in zip((0, 1, 3, 5), weights, strict=True))


def test_a_state_that_cannot_be_cut_is_named_and_nothing_has_changed() -> None:
    net, neurons = net_and_neurons()
    optimizer = torch.optim.LBFGS(net.parameters())
    step(net, optimizer)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match=r"LBFGS's state .* of 0.weight"):
        neurons.remove({"0": [1]}, optimizer)
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in before.items())
    assert neurons.version == 0
    step(net, optimizer)


def test_an_optimizer_of_another_network_is_refused() -> None:
    net, neurons = net_and_neurons()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optimizer holds none of the network's parameters"):
        neurons.remove({"0": [1]}, other)
    assert net[0].out_channels == 6


def test_an_average_is_cut_along_and_another_network_refused() -> None:
    net, neurons = net_and_neurons()
    average = copy.deepcopy(net)
    wrong = nn.Sequential(conv(3, 6))
    with pytest.raises(
        ValueError, match=r"also\[1\] is not a network of the same shape: 1.weight is missing, here \(6,\)"
    ):
        neurons.remove({"0": [1]}, also=[average, wrong])
    assert net[0].out_channels == average[0].out_channels == 6
    neurons.remove({"0": [1]}, also=[average])
    assert [t.shape for t in average.state_dict().values()] == [t.shape for t in net.state_dict().values()]
    assert average[0].out_channels == 5
    average.load_state_dict(net.state_dict())


def test_listeners_are_told_before_and_committed_together() -> None:
    net, neurons = net_and_neurons()
    kept = torch.arange(6)
    seen: list[Removal] = []

    def listener(removal: Removal) -> Any:
        seen.append(removal)
        assert net[0].weight.shape[0] == 6
        mine = removal.cut("0.bias", kept)

        def commit() -> None:
            nonlocal kept
            kept = mine

        return commit

    neurons.listeners.append(listener)
    neurons.remove({"0": [0, 2]})
    assert kept.tolist() == [1, 3, 4, 5]
    assert seen[0].slices["3.weight"][1].tolist() == [1, 3, 4, 5]
    assert seen[0].widths["0"] == {"out_channels": 4}


@pytest.mark.parametrize("moment", ["prepare", "commit"])
def test_a_listener_that_fails_leaves_everything_as_it_was(moment: str) -> None:
    net, neurons = net_and_neurons()
    optimizer = torch.optim.Adam(net.parameters())
    step(net, optimizer)
    before, state = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
    grads = [p.grad for p in net.parameters()]

    def fail() -> None:
        raise RuntimeError("no")

    neurons.listeners.append(lambda removal: fail() if moment == "prepare" else fail)  # type: ignore[arg-type, return-value, func-returns-value]
    with pytest.raises(RuntimeError, match="no"):
        neurons.remove({"0": [0, 2], "3": [1]}, optimizer)
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in before.items())
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
    assert all(p.grad is grad for p, grad in zip(net.parameters(), grads, strict=True))
    assert (net[0].out_channels, net[1].num_features, neurons.version) == (6, 6, 0)
    neurons.listeners.clear()
    neurons.remove({"0": [0, 2]}, optimizer)
    step(net, optimizer)


def test_everything_else_stays_as_it_was() -> None:
    net, _ = net_and_neurons()
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    net[1].eval()
    net[3].weight.requires_grad_(False)
    called: list[str] = []
    net[0].register_forward_hook(lambda *_: called.append("forward"))
    net[0].weight.register_hook(lambda grad: called.append("grad"))
    identities = [id(t) for t in [*net.parameters(), *net.buffers()]]
    modes = [module.training for module in net.modules()]
    random_state = torch.get_rng_state()
    statistics = net[1].running_mean.clone()
    neurons = Neurons(net, torch.zeros(2, 3, 8, 8))
    called.clear()
    neurons.remove({"0": [1], "3": [2]})
    called.clear()
    assert torch.equal(random_state, torch.get_rng_state())
    assert modes == [module.training for module in net.modules()]
    assert identities == [id(t) for t in [*net.parameters(), *net.buffers()]]
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not net[0].weight.is_contiguous()
    assert not net[3].weight.requires_grad
    assert net[0].weight.requires_grad
    assert torch.equal(net[1].running_mean, statistics[[0, 2, 3, 4, 5]])
    net(torch.randn(2, 3, 8, 8)).sum().backward()
    assert called == ["forward", "grad"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(dtype)
    Neurons(net, torch.zeros(2, 3, dtype=dtype)).remove({"0": [0]})
    assert {p.dtype for p in net.parameters()} == {dtype}
    assert net(torch.zeros(2, 3, dtype=dtype)).dtype == dtype


def test_a_graph_made_before_the_removal_does_not_stop_training() -> None:
    net, neurons = net_and_neurons()
    old = net(torch.randn(2, 3, 8, 8)).sum()
    neurons.remove({"0": [1]})
    net(torch.randn(2, 3, 8, 8)).sum().backward()
    del old


def test_members_of_a_group_go_together_whoever_is_named() -> None:
    case = CASES["residual"]
    neurons = Neurons(case.net(), case.inputs()[0])
    removed = neurons.remove({"stem.0": [3]})
    assert removed == {"stem.0": [3], "c2": [3]}
    assert removed.taken == 2


def test_an_empty_selection_changes_nothing() -> None:
    _, neurons = net_and_neurons()
    assert neurons.remove({}) == {}
    assert neurons.remove({"0": []}) == {}
    assert neurons.version == 0


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({"zero": [0]}, "no layer 'zero' with neurons"),
        ({"0": [6]}, "0: no neuron 6; it has 6 living ones, 0 to 5"),
        ({"0": [-1]}, "0: no neuron -1"),
        ({"0": [0.5]}, "0: positions must be a list of whole numbers"),
        ({"0": [True, False]}, "0: positions must be a list of whole numbers"),
        ({"0": [0, 1, 2, 3, 4, 5]}, "0: the selection would leave it without neurons"),
        ([0], r"^selection: \[0\] was given; a dict such as \{'layer': \[0, 1\]\} would do$"),
        (None, "^selection: None was given; a dict such as"),
        ({"5": [0]}, "5: neurons cannot be removed: it is the network's output"),
    ],
)
def test_a_wrong_selection_is_named_and_nothing_has_changed(selection: Any, message: str) -> None:
    net, neurons = net_and_neurons()
    before = copy.deepcopy(net.state_dict())
    for call in (neurons.preview, neurons.remove):
        with pytest.raises(ValueError, match=message):
            call(selection)
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "sgd"}, "^optimizer: 'sgd' was given; a torch.optim.Optimizer of the network would do$"),
        ({"also": nn.Sequential(nn.Linear(3, 4))}, "^also: a Sequential was given; a list of networks would do$"),
        ({"also": nn.Linear(3, 4)}, "^also: a Linear was given; a list of networks would do$"),
        ({"also": None}, "^also: a NoneType was given; a list of networks would do$"),
        ({"also": [3]}, r"^also\[0\]: a int was given; a network would do$"),
    ],
)
def test_a_wrong_companion_is_named_and_nothing_has_changed(options: Any, message: str) -> None:
    net, neurons = net_and_neurons()
    with pytest.raises(ValueError, match=message):
        neurons.remove({"0": [0]}, **options)
    assert (net[0].out_channels, len(net[0].weight), neurons.version) == (6, 6, 0)


def test_a_selection_is_valid_until_the_next_removal() -> None:
    _, neurons = net_and_neurons()
    scores = {layer.name: torch.rand(layer.alive) for layer in neurons.layers}
    old = neurons.least(scores, 2)
    neurons.remove({"0": [0]})
    with pytest.raises(ValueError, match="made before the last removal"):
        neurons.remove(old)


def test_a_network_changed_behind_our_back_is_noticed() -> None:
    net, neurons = net_and_neurons()
    net[3] = conv(6, 7)
    with pytest.raises(ValueError, match=r"3.weight has shape \(7, 6, 3, 3\); the network was changed"):
        neurons.remove({"0": [0]})


STALE: dict[str, Callable[[nn.Module, Neurons], Any]] = {
    "remove": lambda net, neurons: neurons.remove({"0": [0]}),
    "preview": lambda net, neurons: neurons.preview({}),
    "kept": lambda net, neurons: neurons.kept,
    "count": lambda net, neurons: neurons.count,
    "macs": lambda net, neurons: neurons.macs,
    "layers": lambda net, neurons: neurons.layers,
    "least": lambda net, neurons: neurons.least({"0": torch.rand(6)}, 2),
    "sensitivity": lambda net, neurons: hgnp.sensitivity(
        net, neurons, [(torch.zeros(2, 3, 8, 8), torch.zeros(2).long())]
    ),
    "l1": lambda net, neurons: hgnp.sensitivity(net, neurons, [], criterion="l1"),
}


@pytest.mark.parametrize("ask", STALE.values(), ids=STALE)
def test_what_another_has_cut_is_noticed_by_whoever_asks(ask: Any) -> None:
    net, neurons = net_and_neurons()
    Neurons(net, torch.zeros(2, 3, 8, 8)).remove({"0": [0]})
    with pytest.raises(
        ValueError, match=r"0.weight has shape \(5, 3, 3, 3\); the network was changed after Neurons was"
    ):
        ask(net, neurons)


def test_protected_layers_stay() -> None:
    _, neurons = net_and_neurons(protect=["3"])
    assert [layer.name for layer in neurons.layers] == ["0"]
    assert ("3", "it is protected") in [(entry.name, entry.reason) for entry in neurons.frozen]
    with pytest.raises(ValueError, match="protect: no module '7'"):
        net_and_neurons(protect=["7"])
    with pytest.raises(TypeError, match="protect must be a list of names"):
        net_and_neurons(protect="3")
    with pytest.raises(TypeError, match=r"^protect must be a list of names, not NoneType; \[\] protects nothing$"):
        net_and_neurons(protect=None)


def test_the_network_can_be_moved_after_it_was_looked_at() -> None:
    net, neurons = net_and_neurons()
    net.to(torch.float64)
    neurons.remove({"0": [0]})
    assert net(torch.zeros(2, 3, 8, 8, dtype=torch.double)).shape == (2, 4)


def test_it_reads_well() -> None:
    _, neurons = net_and_neurons()
    neurons.remove({"0": [0]})
    assert repr(neurons) == "Neurons(Sequential: 10 in 2 layers can go, 4 are frozen, 95.7% of the parameters kept)"
    assert str(neurons).splitlines() == [
        "layer  alive  total",
        "0          5      6",
        "3          5      5",
        f"10 neurons, {sum(p.numel() for p in neurons.net.parameters()):,} parameters (95.7% kept), {neurons.macs:,} MACs",
        "frozen: 4 in 5: it is the network's output",
    ]
