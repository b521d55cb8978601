"""Forward passes that take another path than the traced one: scored like gates written by hand, or refused by module."""

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hgnp
from hgnp.pruning import structure
from hgnp.scoring import normalised

Batch = tuple[Tensor, Tensor]


class Gated(nn.Module):
    """A network with a gate wherever an output is read: `gates[layer]` is (N, width), or absent. Each of `layers` has the gate
    that it is mapped to."""

    layers: ClassVar[dict[str, str]]

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[str, Tensor] = {}

    def gate(self, layer: str, x: Tensor) -> Tensor:
        if layer not in self.gates:
            return x
        gate = self.gates[layer]
        return x * gate.reshape(len(gate), *(1 for _ in range(x.dim() - 2)), -1)


def by_hand(net: Gated, batch: Batch) -> dict[str, Tensor]:
    """mean_i |N·∂C/∂γ_i| of every layer."""
    x, y = batch
    widths = {gate: net.get_submodule(gate).weight.shape[0] for gate in net.layers.values()}
    net.gates = {gate: torch.ones(len(x), n, dtype=torch.double, requires_grad=True) for gate, n in widths.items()}
    gates = dict(net.gates)
    slopes = torch.autograd.grad(
        F.cross_entropy(net(x), y), list(gates.values()), allow_unused=True, materialize_grads=True
    )
    net.gates = {}
    found = dict(zip(gates, (len(x) * slope.abs().mean(0) for slope in slopes), strict=True))
    return normalised({layer: found[gate] for layer, gate in net.layers.items()})


def batch(samples: int, *shape: int) -> Batch:
    return torch.randn(samples, *shape, dtype=torch.double), torch.arange(samples) % 3


def scored_as_by_hand(net: Gated, neurons: hgnp.Neurons, given: Batch) -> None:
    expected, found = by_hand(net, given), hgnp.sensitivity(net, neurons, [given])
    assert found.keys() == expected.keys()
    for layer in expected:
        torch.testing.assert_close(found[layer], expected[layer], rtol=1e-9, atol=1e-12)


class Recurrent(Gated):
    """A cell in a loop over time. With `functional`, all of a step but its two layers is in the network's own forward."""

    layers: ClassVar[dict[str, str]] = {"cell.x": "cell.x", "cell.h": "cell.x"}

    def __init__(self, functional: bool, from_zeros: bool = False) -> None:
        super().__init__()
        self.cell = nn.ModuleDict({"x": nn.Linear(3, 5), "h": nn.Linear(5, 5)})
        self.out, self.act = nn.Linear(5, 3), nn.Tanh()
        self.functional, self.from_zeros = functional, from_zeros

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), self.cell["h"].in_features) if self.from_zeros else torch.tanh(self.cell["x"](x[:, 0]))
        for t in range(not self.from_zeros, x.shape[1]):
            total = self.cell["x"](x[:, t]) + self.cell["h"](self.gate("cell.x", h))
            h = torch.tanh(total) if self.functional else self.act(total)
        return self.out(self.gate("cell.x", h))


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("from_zeros", [False, True])
@pytest.mark.parametrize("steps", [1, 3, 5, 8])
def test_a_loop_traced_with_five_steps_is_scored_with_any_number(
    functional: bool, from_zeros: bool, steps: int
) -> None:
    torch.manual_seed(0)
    net = Recurrent(functional, from_zeros).double()
    neurons = hgnp.Neurons(net, batch(4, 5, 3)[0])
    given = batch(6, steps, 3)
    scored_as_by_hand(net, neurons, given)
    neurons.remove({"cell.x": [1, 3]})
    scored_as_by_hand(net, neurons, given)


def test_batches_on_different_paths_are_scored_together() -> None:
    torch.manual_seed(0)
    net = Recurrent(True).double()
    neurons = hgnp.Neurons(net, batch(4, 5, 3)[0])
    batches = [batch(6, steps, 3) for steps in (8, 5, 2, 8, 5)]
    found = hgnp.sensitivity(net, neurons, batches)
    raw = torch.zeros(5, dtype=torch.double)
    for x, y in batches:
        net.gates = {"cell.x": torch.ones(6, 5, dtype=torch.double, requires_grad=True)}
        (slope,) = torch.autograd.grad(F.cross_entropy(net(x), y), net.gates["cell.x"], materialize_grads=True)
        raw += 6 * slope.abs().sum(0)
        net.gates = {}
    torch.testing.assert_close(found["cell.x"], raw / raw.norm(), rtol=1e-9, atol=1e-12)


NO_OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "to dtype": lambda w, x: w.to(x.dtype),
    "to tensor": lambda w, x: w.to(x),
    "double": lambda w, x: w.double(),
    "type_as": lambda w, x: w.type_as(x),
    "contiguous": lambda w, x: w.contiguous(),
    "cpu": lambda w, x: w.cpu(),
    "plus": lambda w, x: +w,
    "as_tensor": lambda w, x: torch.as_tensor(w),
    "dropout": lambda w, x: F.dropout(w, 0.1, training=False),
}


class NoOps(Gated):
    """Weights and a buffer pass through a call that returns its own argument, and are read directly too."""

    layers: ClassVar[dict[str, str]] = {"a": "a", "b": "a"}

    def __init__(self, no_op: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.out, self.no_op = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3), no_op
        self.register_buffer("scale", torch.linspace(1, 2, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate("a", torch.tanh(self.a(x)).to(self.b.weight) * self.no_op(self.scale, x))
        weight = self.no_op(self.b.weight, x)
        x = self.gate("a", torch.tanh(F.linear(x, weight, self.no_op(self.b.bias, x)) * self.scale))
        return self.out(self.gate("a", torch.tanh(self.b(x))))


@pytest.mark.parametrize("no_op", NO_OPS.values(), ids=NO_OPS)
def test_a_call_that_returns_a_weight_as_it_is_changes_no_score(no_op: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    net = NoOps(no_op).double()
    given = batch(6, 5)
    neurons = hgnp.Neurons(net, given[0])
    scored_as_by_hand(net, neurons, given)
    neurons.remove({"a": [1, 3]})
    scored_as_by_hand(net, neurons, given)


class Branching(Gated):
    """Another layer, at the end or in between, for long inputs."""

    layers: ClassVar[dict[str, str]] = {"a": "a", "b": "b"}

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.a, self.b, self.near, self.far = nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(5, 3), nn.Linear(4, 3)
        self.early = early

    def forward(self, x: Tensor) -> Tensor:
        a = self.gate("a", torch.tanh(self.a(x)))
        z = self.near(a.mean(1))
        if x.shape[1] <= 4:
            return z
        far = self.far(self.gate("b", torch.tanh(self.b(a))).mean(1))
        return far if self.early else z + far


@pytest.mark.parametrize("early", [False, True])
def test_a_traced_branch_can_be_skipped(early: bool) -> None:
    torch.manual_seed(0)
    net = Branching(early).double()
    neurons = hgnp.Neurons(net, batch(4, 6, 3)[0])
    for steps in (6, 5, 3):
        scored_as_by_hand(net, neurons, batch(6, steps, 3))


def test_an_untraced_branch_is_refused_by_name() -> None:
    net = Branching(False).double()
    neurons = hgnp.Neurons(net, batch(4, 3, 3)[0])
    assert [layer.name for layer in neurons.layers] == ["a"]
    with pytest.raises(
        ValueError, match=r"^net must take a traced path, got another one in b \(.*\); create Neurons with"
    ) as caught:
        hgnp.sensitivity(net, neurons, [batch(6, 6, 3)])
    assert "\n" not in str(caught.value)


class Crossed(nn.Module):
    """Who reads which channels depends on how many samples there are; functions, parameters and sizes do not."""

    def __init__(self, pick: Callable[[Tensor, bool], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(3, 8)
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)
        self.pick = pick

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.pick(torch.tanh(self.a(x)), len(x) > 4)
        return self.left(left) * self.right(right)


PICKS: dict[str, Callable[[Tensor, bool], tuple[Tensor, Tensor]]] = {
    "by slices": lambda h, late: (h[:, 4:], h[:, :4]) if late else (h[:, :4], h[:, 4:]),
    "by order": lambda h, late: h.chunk(2, 1)[::-1] if late else h.chunk(2, 1),
    "by steps": lambda h, late: (h[..., late::2], h[..., 1 - late :: 2]),
}


@pytest.mark.parametrize("pick", PICKS)
def test_channels_read_by_another_layer_than_traced_are_refused(pick: str) -> None:
    torch.manual_seed(0)
    net = Crossed(PICKS[pick]).double()
    neurons = hgnp.Neurons(net, batch(4, 3)[0])
    assert "a" in hgnp.sensitivity(net, neurons, [batch(3, 3)])
    if pick == "by order":  # `chunk` couples the halves, so that either layer may read either
        hgnp.sensitivity(net, neurons, [batch(6, 3)])
        return
    with pytest.raises(ValueError, match=r"^net must take a traced path, got another one in left"):
        hgnp.sensitivity(net, neurons, [batch(6, 3)])


def test_other_sizes_and_code_without_channels_need_no_new_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch size, resolution and code that processes no channels."""

    class Plain(Gated):
        layers: ClassVar[dict[str, str]] = {"a": "a", "b": "b"}

        def __init__(self) -> None:
            super().__init__()
            self.a, self.na, self.b, self.out = (
                nn.Conv2d(2, 4, 3, padding=1),
                nn.BatchNorm2d(4),
                nn.Conv2d(4, 5, 3, padding=1),
                nn.Linear(5, 3),
            )
            self.where = nn.Parameter(torch.randn(1, 4, 9))

        def gate(self, layer: str, x: Tensor) -> Tensor:
            return x * self.gates[layer][:, :, None, None] if layer in self.gates else x

        def forward(self, x: Tensor) -> Tensor:
            n, side = len(x), x.shape[-1]
            scale = x.new_ones(()) * side
            for _ in range(n):
                scale = scale / 1.1
            x = torch.tanh(self.na(self.a(x)) + self.where[:, :, :side].unsqueeze(2))
            x = self.gate("a", x.reshape(n, x.shape[1], side * side).reshape(n, x.shape[1], side, side))
            x = self.gate("b", torch.tanh(self.b(x))) * scale
            z = self.out(x.mean((2, 3)))
            return z / z.norm(dim=1, keepdim=True) if n > 3 else z

    torch.manual_seed(0)
    net = Plain().double().eval()
    neurons = hgnp.Neurons(net, torch.randn(2, 2, 6, 6).double())

    def again(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was traced again")

    monkeypatch.setattr(structure, "trace_forward", again)
    for samples, side in ((1, 6), (2, 8), (5, 4)):
        scored_as_by_hand(net, neurons, batch(samples, 2, side, side))


def test_scoring_removes_its_hooks_also_after_an_error() -> None:
    hooks = torch.nn.modules.module
    net = Branching(False).double()
    neurons = hgnp.Neurons(net, batch(4, 3, 3)[0])
    hgnp.sensitivity(net, neurons, [batch(4, 3, 3)])
    with pytest.raises(ValueError, match="must take a traced path"):
        hgnp.sensitivity(net, neurons, [batch(6, 6, 3)])
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks
    assert not hooks._global_forward_hooks_always_called
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in net.modules())


class Fails(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no")


class Spare(Gated):
    """Continues with `b` when `a` fails, as it always does, halfway."""

    layers: ClassVar[dict[str, str]] = {"b": "b"}

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Sequential(nn.Tanh(), Fails(4, 6)), nn.Linear(4, 6), nn.Linear(7, 3)
        self.own = nn.Parameter(torch.randn(6, 7))

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.a(x)
        except RuntimeError:
            x = self.b(x)
        x = self.gate("b", torch.tanh(x))
        x = torch.tanh(x @ self.own)  # a parameter of the network itself, not of a layer
        return self.out(x)


class WithoutException(Spare):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(torch.tanh(self.b(x)) @ self.own))


def test_an_exception_that_the_network_catches_is_traced_correctly() -> None:
    torch.manual_seed(0)
    net = Spare().double()
    given = batch(5, 4)
    neurons = hgnp.Neurons(net, given[0])
    assert [layer.name for layer in neurons.layers] == ["b"]
    scored_as_by_hand(net, neurons, given)
    flat = hgnp.Flatness(net, mu=0.1, bound=0.0)
    flat.backward(*given)
    twin = WithoutException().double()
    twin.load_state_dict(net.state_dict())
    other = hgnp.Flatness(twin, mu=0.1, bound=0.0)
    other.backward(*given)
    assert flat.block == other.block
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    neurons.remove({"b": [0, 2]})
    assert net.b.weight.shape == (4, 4)
    scored_as_by_hand(net, neurons, given)


def test_an_error_names_the_layer_that_raised_it() -> None:
    net = Spare()
    net.b = nn.Linear(3, 6)
    with pytest.raises(ValueError, match=r"^net must run on example_input in eval mode, but failed in b: "):
        hgnp.Neurons(net, torch.randn(5, 4))


class Attention(Gated):
    """One head, with a mask if there is one."""

    layers: ClassVar[dict[str, str]] = {"q": "q", "k": "q", "v": "v"}

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 6) for _ in range(3))
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        x = F.scaled_dot_product_attention(self.gate("q", q), k, v, attn_mask=mask, scale=1.0)
        return self.out(self.gate("v", x)).mean(1)


def test_attention_traced_without_a_mask_is_scored_with_one() -> None:
    torch.manual_seed(0)
    net, (x, y) = Attention().double(), batch(5, 7, 4)
    neurons = hgnp.Neurons(net, x)
    mask = torch.rand(5, 7, 7) > 0.4
    mask |= torch.eye(7, dtype=torch.bool)
    found = hgnp.sensitivity(net, neurons, [({"x": x, "mask": mask}, y)])
    gates = {name: torch.ones(5, 6, dtype=torch.double, requires_grad=True) for name in "qv"}
    net.gates = dict(gates)
    slopes = torch.autograd.grad(F.cross_entropy(net(x, mask), y), list(gates.values()))
    raw = dict(zip(gates, (slope.abs().sum(0) for slope in slopes), strict=True))
    assert found.keys() == net.layers.keys()
    for layer, gate in net.layers.items():
        torch.testing.assert_close(found[layer], raw[gate] / raw[gate].norm(), rtol=1e-9, atol=1e-12)


class Falling(nn.Module):
    """Catches any error of its loop and takes another path."""

    def __init__(self) -> None:
        super().__init__()
        self.loop, self.other = Recurrent(functional=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.loop(x)
        except ValueError:
            return self.other(x[:, 0])


def test_a_path_error_that_the_network_catches_is_still_handled() -> None:
    net, given = Falling().double(), batch(6, 8, 3)
    found = hgnp.sensitivity(net, hgnp.Neurons(net, given[0][:2, :5]), [given])
    expected = hgnp.sensitivity(net, hgnp.Neurons(net, given[0][:2]), [given])
    for layer in expected:
        assert expected[layer].max() > 0
        torch.testing.assert_close(found[layer], expected[layer], rtol=1e-9, atol=1e-12)


class Projecting(nn.Module):
    """Skips its projection for inputs of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.first, self.last = nn.Linear(7, 20), nn.Linear(20, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            x = self.proj(x)
        return self.last(F.relu(self.first(x)))


def test_a_layer_whose_call_fails_counts_as_unused() -> None:
    neurons = hgnp.Neurons(Projecting(), torch.randn(2, 20))
    assert [layer.name for layer in neurons.layers] == ["first"]
    assert {entry.name: entry.reason for entry in neurons.frozen}["proj"] == "it is not used in the forward pass"
