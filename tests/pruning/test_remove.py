"""`remove` cuts tensors, gradients, optimizer state and attributes atomically, and nothing else."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hgnp
from cases import CASES, conv
from hgnp import Neurons, Removal
from hgnp.removal import listeners_of
from pruning_cases import random_scores


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


def test_remove_cuts_rows_columns_norms_statistics_and_gradients() -> None:
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


def test_remove_cuts_all_columns_of_a_flattened_channel() -> None:
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
def test_every_optimizer_continues_after_a_removal(make: Any) -> None:
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


class Flat(torch.optim.SGD):
    """Keeps the gradients of all parameters with the first one."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        held = [p for group in self.param_groups for p in group["params"]]
        self.state[held[0]]["flat"] = torch.cat([p.grad.flatten() for p in held])


def test_optimizer_state_that_cannot_be_cut_is_refused_and_nothing_changes() -> None:
    net, neurons = net_and_neurons()
    optimizer = Flat(net.parameters(), lr=0.01)
    step(net, optimizer)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match=r"Flat's state 'flat' of 0.weight must have the parameter's shape"):
        neurons.remove({"0": [1]}, optimizer)
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in before.items())
    assert neurons.version == 0
    step(net, optimizer)


def test_an_optimizer_of_another_network_is_refused() -> None:
    net, neurons = net_and_neurons()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"^optimizer must hold parameters of the network, got one that holds none of them$"
    ):
        neurons.remove({"0": [1]}, other)
    assert net[0].out_channels == 6


@pytest.mark.parametrize("separate", [False, True])
def test_optimizers_of_all_networks_are_cut_or_none(separate: bool) -> None:
    """Two networks that learn from each other, with one optimizer or two."""
    net, neurons = net_and_neurons()
    other, _ = net_and_neurons()
    groups = [[*net.parameters()], [*other.parameters()]] if separate else [[*net.parameters(), *other.parameters()]]
    optimizers = [torch.optim.Adam(group) for group in groups]
    for optimizer in optimizers:
        step(net, optimizer)
        step(other, optimizer)
    state = optimizers[-1].state[other[0].weight]
    before = state["exp_avg"].clone()
    state["unknown"] = torch.zeros(7)
    with pytest.raises(ValueError, match=r"Adam's state 'unknown' of 0.weight must have the parameter's shape"):
        neurons.remove({"0": [1]}, optimizers, also=[other])
    assert net[0].out_channels == other[0].out_channels == 6
    assert torch.equal(state["exp_avg"], before)
    del state["unknown"]
    neurons.remove({"0": [1]}, optimizers, also=[other])
    assert torch.equal(state["exp_avg"], before[[0, 2, 3, 4, 5]])
    for optimizer in optimizers:
        step(net, optimizer)
        step(other, optimizer)


def test_also_cuts_copies_and_refuses_other_networks() -> None:
    net, neurons = net_and_neurons()
    average = copy.deepcopy(net)
    wrong = nn.Sequential(conv(3, 6))
    with pytest.raises(
        ValueError, match=r"^also\[1\] must have the tensors of net, 1.weight of shape \(6,\), got none$"
    ):
        neurons.remove({"0": [1]}, also=[average, wrong])
    assert net[0].out_channels == average[0].out_channels == 6
    neurons.remove({"0": [1]}, also=[average])
    assert [t.shape for t in average.state_dict().values()] == [t.shape for t in net.state_dict().values()]
    assert average[0].out_channels == 5
    average.load_state_dict(net.state_dict())


def test_listeners_prepare_before_the_cut_and_commit_with_it() -> None:
    net, neurons = net_and_neurons()
    kept = torch.arange(6)
    removals: list[Removal] = []

    def listener(removal: Removal) -> Any:
        removals.append(removal)
        assert net[0].weight.shape[0] == 6
        mine = removal.cut("0.bias", kept)

        def commit() -> None:
            nonlocal kept
            kept = mine

        return commit

    neurons.listeners.append(listener)
    neurons.remove({"0": [0, 2]})
    assert kept.tolist() == [1, 3, 4, 5]
    assert removals[0].slices["3.weight"][1].tolist() == [1, 3, 4, 5]
    assert removals[0].widths["0"] == {"out_channels": 4}


@pytest.mark.parametrize("moment", ["prepare", "commit"])
def test_a_listener_that_fails_undoes_the_removal(moment: str) -> None:
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


def test_remove_preserves_hooks_modes_layouts_and_identities() -> None:
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
def test_remove_preserves_the_dtype(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(dtype)
    Neurons(net, torch.zeros(2, 3, dtype=dtype)).remove({"0": [0]})
    assert {p.dtype for p in net.parameters()} == {dtype}
    assert net(torch.zeros(2, 3, dtype=dtype)).dtype == dtype


def test_a_loss_from_before_the_removal_does_not_break_backward() -> None:
    net, neurons = net_and_neurons()
    old = net(torch.randn(2, 3, 8, 8)).sum()
    neurons.remove({"0": [1]})
    net(torch.randn(2, 3, 8, 8)).sum().backward()
    del old


def test_coupled_neurons_are_removed_together() -> None:
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
        ({"zero": [0]}, "^selection must name layers with neurons, got 'zero'"),
        ({"0": [6]}, r"^selection\['0'\] must hold positions from 0 to 5, got 6$"),
        ({"0": [-1]}, r"^selection\['0'\] must hold positions from 0 to 5, got -1$"),
        ({"0": [0.5]}, r"^selection\['0'\] must be a list of integers, got"),
        ({"0": [True, False]}, r"^selection\['0'\] must be a list of integers, got"),
        (
            {"0": torch.ones(2, 2).bool()},
            r"^selection\['0'\] must be a list of integers, got torch.bool of shape \(2, 2\)$",
        ),
        ({"0": [0, 1, 2, 3, 4, 5]}, "^selection must leave each layer a neuron, got all of 0$"),
        ([0], r"^selection must be a dict such as \{'layer': \[0, 1\]\}, got \[0\]$"),
        (None, "^selection must be a dict such as .*, got None$"),
        ({"5": [0]}, "^selection must hold prunable neurons, got frozen ones of 5: it is the network's output$"),
    ],
)
def test_an_invalid_selection_is_refused_and_nothing_changes(selection: Any, message: str) -> None:
    net, neurons = net_and_neurons()
    before = copy.deepcopy(net.state_dict())
    for call in (neurons.preview, neurons.remove):
        with pytest.raises(ValueError, match=message):
            call(selection)
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "sgd"}, "^optimizer must be a torch.optim.Optimizer or a list of them, got str$"),
        ({"also": nn.Sequential(nn.Linear(3, 4))}, "^also must be a list of networks, got Sequential$"),
        ({"also": nn.Linear(3, 4)}, "^also must be a list of networks, got Linear$"),
        ({"also": None}, "^also must be a list of networks, got NoneType$"),
        ({"also": [3]}, r"^also\[0\] must be an nn.Module, got int$"),
    ],
)
def test_an_invalid_optimizer_or_copy_is_refused_and_nothing_changes(options: Any, message: str) -> None:
    net, neurons = net_and_neurons()
    with pytest.raises(ValueError, match=message):
        neurons.remove({"0": [0]}, **options)
    assert (net[0].out_channels, len(net[0].weight), neurons.version) == (6, 6, 0)


def test_a_selection_is_valid_until_the_next_removal() -> None:
    _, neurons = net_and_neurons()
    scores = {layer.name: torch.rand(layer.alive) for layer in neurons.layers}
    old = neurons.least(scores, 2)
    neurons.remove({"0": [0]})
    with pytest.raises(ValueError, match=r"^selection must be of version 1, got 0: positions change .*; select again$"):
        neurons.remove(old)


def test_a_network_with_a_replaced_layer_is_refused() -> None:
    net, neurons = net_and_neurons()
    net[3] = conv(6, 7)
    with pytest.raises(
        ValueError, match=r"^3.weight must have shape \(5, 6, 3, 3\), got \(7, 6, 3, 3\); the network changed"
    ):
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
def test_neurons_of_a_network_cut_elsewhere_are_refused(ask: Any) -> None:
    net, neurons = net_and_neurons()
    Neurons(net, torch.zeros(2, 3, 8, 8)).remove({"0": [0]})
    with pytest.raises(
        ValueError,
        match=r"^0.weight must have shape \(6, 3, 3, 3\), got \(5, 3, 3, 3\); the network changed after Neurons was",
    ):
        ask(net, neurons)


def test_protected_layers_are_frozen() -> None:
    _, neurons = net_and_neurons(protect=["3"])
    assert [layer.name for layer in neurons.layers] == ["0"]
    assert ("3", "it is protected") in [(entry.name, entry.reason) for entry in neurons.frozen]
    with pytest.raises(ValueError, match=r"^protect must name modules of the network, got '7'; "):
        net_and_neurons(protect=["7"])
    with pytest.raises(TypeError, match=r"^protect must be a list of module names, got '3'; write protect=\['3'\]$"):
        net_and_neurons(protect="3")
    with pytest.raises(
        TypeError, match=r"^protect must be a list of module names, got NoneType; \[\] protects nothing$"
    ):
        net_and_neurons(protect=None)


@pytest.mark.parametrize("coupling", ["coupled", "paper"])
def test_the_network_can_be_moved_after_neurons_is_created(coupling: Any) -> None:
    net, neurons = net_and_neurons()
    net.to(torch.float64)
    neurons.remove({"0": [0]})
    assert neurons.remove(neurons.least(random_scores(neurons), 2, coupling=coupling))
    assert net(torch.zeros(2, 3, 8, 8, dtype=torch.double)).shape == (2, 4)


def test_neurons_print_as_a_table() -> None:
    _, neurons = net_and_neurons()
    neurons.remove({"0": [0]})
    assert repr(neurons) == "Neurons(Sequential: 10 prunable in 2 layers, 4 frozen, 95.7% of the parameters kept)"
    assert str(neurons).splitlines() == [
        "layer  alive  total",
        "0          5      6",
        "3          5      5",
        f"10 neurons, {sum(p.numel() for p in neurons.net.parameters()):,} parameters (95.7% kept), {neurons.macs:,} MACs",
        "frozen: 4 in 5: it is the network's output",
    ]


@pytest.mark.parametrize("reset", [False, True])
def test_lbfgs_is_refused(reset: bool) -> None:
    """Without state, too: it knows how many weights there were in its first step."""
    net, neurons = net_and_neurons()
    optimizer = torch.optim.LBFGS(net.parameters())
    step(net, optimizer)
    if reset:
        optimizer.state.clear()
    with pytest.raises(
        ValueError, match=r"^optimizer must keep its state by parameter, as SGD and AdamW do, got LBFGS$"
    ):
        neurons.remove({"0": [1]}, optimizer)
    assert neurons.version == 0
    step(net, optimizer)


@pytest.mark.parametrize(
    ("key", "width", "refused"), [("left", 6, True), ("left", 5, False), ("exp_avg_var", 6, False)]
)
def test_an_unknown_square_state_of_a_square_weight_is_refused_and_nothing_changes(
    key: str, width: int, refused: bool
) -> None:
    """A left preconditioner GGᵀ has the shape of such a weight. It must lose a row and a column, not a row alone."""
    net = nn.Sequential(nn.Linear(width, 6, bias=False), nn.Tanh(), nn.Linear(6, 2)).double()
    neurons, optimizer = Neurons(net, torch.zeros(2, width).double()), torch.optim.SGD(net.parameters(), lr=0.1)
    state = torch.randn(6, width).double()
    optimizer.state[net[0].weight][key] = state
    before = copy.deepcopy(net.state_dict())
    if refused:
        with pytest.raises(
            ValueError, match=r"^SGD's state 'left' of 0.weight must be known .* square tensor \(6, 6\)"
        ):
            neurons.remove({"0": [1]}, optimizer)
        torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
        assert optimizer.state[net[0].weight][key] is state
        neurons.remove({"2": []}, optimizer)
    else:
        neurons.remove({"0": [1]}, optimizer)
        torch.testing.assert_close(optimizer.state[net[0].weight][key], state[[0, 2, 3, 4, 5]], rtol=0, atol=0)


class Kept(torch.optim.SGD):
    """Keeps something of each weight's gradient under a key of its own."""

    def __init__(self, params: Any, kept: Callable[[Tensor], Tensor]) -> None:
        super().__init__(params, lr=0.1)
        self.kept = kept

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["z"] = self.kept(parameter.grad)


def gram(grad: Tensor) -> Tensor:
    """A left preconditioner."""
    return grad @ grad.T if grad.dim() == 2 else grad.clone()


def gram_of_matrices(gradient: Tensor) -> Tensor:
    """As optimizers have it that treat matrices alone with a preconditioner."""
    return gram(gradient) if gradient.dim() == 2 else gradient.clone()


@pytest.mark.parametrize(
    ("kept", "outputs", "works"),
    [(torch.clone, 2, True), (gram, 2, False), (gram_of_matrices, 6, False), (torch.clone, 6, False)],
)
def test_square_state_of_a_square_weight_is_known_by_that_of_other_matrices(
    kept: Callable[[Tensor], Tensor], outputs: int, works: bool
) -> None:
    """Not by that of a convolution."""
    first = nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, outputs)
    net = nn.Sequential(*first, nn.Unflatten(1, (1, outputs)), nn.Conv1d(1, 2, 2)).double()
    x = torch.randn(4, 6, dtype=torch.double)
    neurons, optimizer = Neurons(net, x), Kept(net.parameters(), kept)
    net(x).square().sum().backward()
    optimizer.step()
    before = optimizer.state[net[0].weight]["z"].clone()
    if works:
        neurons.check_optimizer(optimizer)
        neurons.remove({"0": [1, 2]}, optimizer)
        assert torch.equal(optimizer.state[net[0].weight]["z"], before[[0, 3, 4, 5]])
    else:
        with pytest.raises(ValueError, match=r"Kept's state 'z' of 0.weight must be known to have an entry for each"):
            neurons.remove({"0": [1, 2]}, optimizer)
        assert net[0].out_features == 6


def test_a_run_refuses_unknown_square_state_after_its_first_epoch() -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    batch = torch.randn(8, 6), torch.arange(8) % 6
    epochs: list[int] = []
    recipe = hgnp.Recipe(keep=0.5, method="taylor", warmup_epochs=5, finetune_epochs=0, measure="none")
    with pytest.raises(hgnp.HgnpError, match=r"Kept's state 'z' of 0.weight must be known"):
        hgnp.prune(
            net,
            [batch],
            recipe=recipe,
            optimizer=lambda p: Kept(p, torch.clone),
            on_step=lambda state: epochs.append(state.epoch),
            verbose=False,
        )
    assert epochs == [0]


def test_scoring_without_flatness_registers_no_listener() -> None:
    model = nn.Sequential(nn.Linear(4, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 3))
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    neurons, flat = hgnp.Neurons(model, x), hgnp.Flatness(model)
    before = listeners_of(model)
    for _ in range(5):
        hgnp.sensitivity(model, neurons, [(x, y)])
    gc.collect()
    assert before
    assert listeners_of(model) == before
    del before
    neurons.remove({"0": [0]})
    del flat
    gc.collect()
    assert not listeners_of(model)
