"""Networks that would come out wrong if widths, chance, caches or places were taken lightly."""

import copy
import random
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import hgnp
from cases import Net, conv
from hgnp import Neurons
from oracles import masked, worst_error

X = torch.randn(4, 5, dtype=torch.double, generator=torch.Generator().manual_seed(0))
PICTURE = torch.randn(2, 3, 6, 6, dtype=torch.double, generator=torch.Generator().manual_seed(0))


def two(forward: Any, **modules: Any) -> nn.Module:
    torch.manual_seed(0)
    return Net(forward, a=nn.Linear(5, 12), out=nn.Linear(12, 3), **modules).double().eval()


def prunable(net: nn.Module, x: Any = X) -> list[str]:
    return [layer.name for layer in Neurons(net, x).layers]


# Numbers that depend on the width

WIDTH_IN_A_NUMBER = {
    "ones summed": lambda n, h: n.out(h / torch.ones_like(h).sum(1, keepdim=True)),
    "ones counted": lambda n, h: n.out(h * torch.ones_like(h).cumsum(1)),
    "softmax of zeros": lambda n, h: n.out(h * torch.zeros_like(h).softmax(1)),
    "norm of ones": lambda n, h: n.out(h) / torch.ones(h.size(1)).double().norm(),
    "halves": lambda n, h: n.out(h * torch.cat([h.new_zeros(h.size(1) // 2), h.new_ones(h.size(1) - h.size(1) // 2)])),
    "expanded and summed": lambda n, h: n.out(h) * h.new_tensor(2.0).expand(h.size(1)).sum(),
    "a list of numbers": lambda n, h: n.out(h) * torch.tensor([1.0, 2.0, h.size(1)]).double(),
    "one of a list": lambda n, h: n.out(h * torch.tensor([1.0, h.size(1) ** -0.5]).double()[1]),
    "from NumPy": lambda n, h: n.out(h) * torch.from_numpy(np.array([1.0, 2.0, h.size(1)])),
    "the shape": lambda n, h: n.out(h) / torch.tensor(h.shape).prod(),
    "the order of a norm": lambda n, h: n.out(h) * h.norm(p=h.size(1), dim=1, keepdim=True),
    "weights summed with ones": lambda n, h: n.out(h * n.w) * (n.w @ torch.ones(len(n.w)).double()),
}


@pytest.mark.parametrize("code", WIDTH_IN_A_NUMBER.values(), ids=WIDTH_IN_A_NUMBER)
def test_a_number_that_depends_on_the_width_freezes(code: Any) -> None:
    net = two(lambda n, x: code(n, n.a(x)), w=nn.Parameter(torch.rand(12)))
    assert prunable(net) == []


def test_places_in_space_moved_by_the_width_freeze() -> None:
    net = Net(lambda n, x: n.b(torch.roll(n.a(x), n.a.out_channels, 2)), a=conv(3, 8), b=conv(8, 2)).double()
    assert prunable(net, PICTURE) == []


def test_an_average_that_counts_what_was_there_freezes() -> None:
    """A partial convolution divides by how many entries it saw."""

    def forward(n: Any, x: Tensor) -> Tensor:
        h = n.a(x)
        return n.b(h) / F.conv2d(torch.ones_like(h), torch.ones(1, h.size(1), 1, 1).double())  # type: ignore[no-any-return]

    assert prunable(Net(forward, a=conv(3, 8), b=nn.Conv2d(8, 2, 1)).double(), PICTURE) == []


def test_channels_turned_into_shares_freeze() -> None:
    """Talking heads: a softmax over keys makes shares of a masked head too."""

    def forward(n: Any, x: Tensor) -> Tensor:
        return n.out(n.b(n.a(x).softmax(1)).mean(1))  # type: ignore[no-any-return]

    net = Net(forward, a=nn.Linear(5, 6), b=nn.Linear(6, 7), out=nn.Linear(7, 2)).double()
    assert prunable(net, torch.randn(2, 4, 5).double()) == ["b"]


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_over_places_adds_its_bias_to_dead_channels_too(bias: bool) -> None:
    """Token mixing: with a bias a masked channel does not stay zero; without one it does."""

    def forward(n: Any, x: Tensor) -> Tensor:
        h = n.a(x)
        h = h + n.places(h.transpose(1, 2)).transpose(1, 2)
        return n.out(h.mean(1))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    net = Net(forward, a=nn.Linear(5, 6), places=nn.Linear(4, 4, bias=bias), out=nn.Linear(6, 2)).double().eval()
    x = torch.randn(2, 4, 5).double()
    whole, neurons = copy.deepcopy(net), Neurons(net, x)
    assert [layer.name for layer in neurons.layers] == ([] if bias else ["a"])
    if not bias:
        removed = neurons.remove({"a": [1, 3]})
        with torch.no_grad(), masked(whole, removed, ((x,), {})):
            assert worst_error(net(x), whole(x)) < 1e-10


# Places


def test_places_looked_up_by_another_layers_output_go_together() -> None:
    def forward(n: Any, x: Tensor) -> Tensor:
        where = n.g(x).flatten(2).argmax(2, keepdim=True)
        return n.out(torch.gather(n.a(x).flatten(2), 2, where)[..., 0])  # type: ignore[no-any-return]

    torch.manual_seed(0)
    net = Net(forward, a=conv(3, 8), g=conv(3, 8), out=nn.Linear(8, 2)).double().eval()
    whole = copy.deepcopy(net)
    removed = Neurons(net, PICTURE).remove({"a": [2]})
    assert removed == {"a": [2], "g": [2]}
    with torch.no_grad(), masked(whole, removed, ((PICTURE,), {})):
        assert worst_error(net(PICTURE), whole(PICTURE)) < 1e-10


# Outputs in containers of any kind


class Mine(dict[str, Any]):
    pass


class Listed(list[Any]):
    pass


@dataclass(slots=True)
class Slotted:
    y: Tensor


@pytest.mark.parametrize("kind", [lambda y: Mine(y=y), lambda y: Listed([y]), Slotted], ids=["dict", "list", "slots"])
def test_outputs_are_found_in_any_container(kind: Any) -> None:
    assert prunable(two(lambda n, x: kind(n.out(n.a(x).tanh())))) == ["a"]


def test_an_output_that_cannot_be_found_is_refused() -> None:
    with pytest.raises(ValueError, match="its output, a NoneType, holds no tensor"):
        Neurons(two(lambda n, x: None), X)


# What the network keeps for itself


def test_caches_of_the_network_stay_as_they_were() -> None:
    def forward(n: Any, x: Tensor) -> Tensor:
        if len(x) not in n.cache:
            n.cache[len(x)] = torch.arange(len(x), dtype=x.dtype)[:, None]
        h = n.a(x)
        n.seen.append(h)
        return n.out(h.tanh() + n.cache[len(x)] * 0)  # type: ignore[no-any-return]

    net = two(forward)
    net.cache, net.seen = {}, []  # type: ignore[assignment]
    neurons = Neurons(net, X)
    neurons.remove({"a": [0]})
    assert net.cache == {}
    assert net.seen == []
    assert not isinstance(net(X), FakeTensor)


def test_tensors_kept_elsewhere_are_warned_of() -> None:
    kept: list[Tensor] = []
    net = two(lambda n, x: n.out(n.a(x).tanh()))
    handle = net.a.register_forward_hook(lambda module, args, output: kept.append(output))  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match="kept tensors of a forward that computed nothing"):
        Neurons(net, X)
    handle.remove()


# Chance


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["random", "numpy"])
def test_a_path_left_to_chance_freezes_everything(draw: Any) -> None:
    def forward(n: Any, x: Tensor) -> Tensor:
        h = n.a(x)
        return n.out(h + n.b(h) if n.training and draw() < 0.5 else h)  # type: ignore[no-any-return]

    neurons = Neurons(two(forward, b=nn.Linear(12, 12)), X)
    assert neurons.count == 0
    assert "random numbers" in neurons.frozen[0].reason


@pytest.mark.parametrize(("probability", "expected"), [(0.0, ["a", "b"]), (1.0, ["a", "b"]), (0.1, [])])
def test_a_layer_dropped_always_or_never_is_known(probability: float, expected: list[str]) -> None:
    def forward(n: Any, x: Tensor) -> Tensor:
        h = n.a(x)
        if not (n.training and torch.rand([]) < probability):
            h = n.c(n.b(h).tanh())
        return n.out(h)  # type: ignore[no-any-return]

    net = two(forward, b=nn.Linear(12, 7), c=nn.Linear(7, 12)).train()
    assert [name for name in prunable(net) if name in "ab"] == expected


# Optimizers, files, threads


def test_lbfgs_is_refused_wherever_its_state_is() -> None:
    net = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = torch.optim.LBFGS(net.parameters())

    def loss() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = net(X).pow(2).mean()
        value.backward()
        return value

    optimizer.step(loss)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="LBFGS's state"):
        Neurons(net, X).remove({"2": [0, 4]}, optimizer)


class Scaled(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.alpha = nn.Parameter(torch.ones(1))
        self.in_scale = nn.Parameter(torch.rand(inputs))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.in_scale) * self.alpha


SPECIAL = {
    "spectral norm by hook": lambda: nn.utils.spectral_norm(nn.Linear(8, 7)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 7)),
    "vectors of its own": lambda: Scaled(8, 7),
}


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
def test_special_layers_are_pruned_around_saved_and_loaded(make: Any, tmp_path: Any) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return (
            nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), make(), nn.Tanh(), nn.Linear(7, 2))
            .double()
            .eval()
        )

    net = build()
    Neurons(net, X).remove({"0": [1, 2]})
    hgnp.save(net, tmp_path)
    with torch.no_grad():
        assert torch.equal(hgnp.load(tmp_path, build())(X), net(X))


def test_complex_numbers_that_cannot_be_stored_are_named(tmp_path: Any) -> None:
    with pytest.raises(TypeError, match=r"weight is torch.complex128, which safetensors cannot hold"):
        hgnp.save(nn.Linear(2, 2, dtype=torch.complex128), tmp_path)


def test_networks_in_several_threads() -> None:
    def work(place: int) -> None:
        net = nn.Sequential(
            conv(3, 6), nn.BatchNorm2d(6), nn.ReLU(), conv(6, 6), nn.Flatten(), nn.Linear(216, 2)
        ).double()
        found[place] = prunable(net, PICTURE)

    found: dict[int, list[str]] = {}
    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(3)] == [["0", "3"]] * 3


def test_inference_mode_does_not_matter() -> None:
    net = two(lambda n, x: n.out(n.a(x).tanh()))
    with torch.inference_mode():
        assert prunable(net) == ["a"]


def test_batch_norm_that_averages_over_all_time() -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, momentum=None), nn.ReLU(), nn.Linear(6, 2)).double()
    assert prunable(net) == ["0"]
    assert int(net[1].num_batches_tracked) == 0


# What least proposes, remove accepts


def linear_attention(n: Any, x: Tensor) -> Tensor:
    q, k, v = n.q(x).relu(), n.k(x).relu(), n.v(x)
    return n.out(torch.einsum("nld,nde->nle", q, torch.einsum("nld,nle->nde", k, v)))  # type: ignore[no-any-return]


PICKY = {
    "linear attention": lambda: (
        Net(linear_attention, q=nn.Linear(5, 4), k=nn.Linear(5, 4), v=nn.Linear(5, 6), out=nn.Linear(6, 2)),
        torch.randn(2, 3, 5).double(),
    ),
    "squeeze": lambda: (
        Net(lambda n, x: n.out(n.a(x).mean((2, 3), keepdim=True).squeeze()), a=conv(3, 6), out=nn.Linear(6, 2)),
        PICTURE,
    ),
    "every other channel": lambda: (Net(every_other, a=nn.Linear(5, 12), b=nn.Linear(5, 6), out=nn.Linear(12, 2)), X),
}


def every_other(n: Any, x: Tensor) -> Tensor:
    h = n.a(x) * 1
    h[:, ::2] += n.b(x)
    return n.out(h.tanh())  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", PICKY.values(), ids=PICKY)
def test_what_least_proposes_remove_accepts(make: Any) -> None:
    net, x = make()
    net = net.double().eval()
    whole = copy.deepcopy(net)
    neurons = Neurons(net, x)
    draw = torch.Generator().manual_seed(0)
    scores = {layer.name: torch.rand(layer.alive, generator=draw) for layer in neurons.layers}
    removed = neurons.remove(neurons.least(scores, 10_000))
    with torch.no_grad(), masked(whole, removed, ((x,), {})):
        assert worst_error(net(x), whole(x)) < 1e-10


def test_groups_laid_out_beside_padding_come_to_an_end() -> None:
    """Channels and fixed zeros in one grid: what cannot be told apart is frozen, and the search for it ends."""

    def forward(n: Any, x: Tensor) -> Tensor:
        h = F.pad(n.a(x), (0, 0, 0, 0, 1, 1)).unflatten(1, (3, 2)).transpose(1, 2).flatten(1, 2)
        return n.b(h)  # type: ignore[no-any-return]

    assert prunable(Net(forward, a=conv(3, 4), b=conv(6, 2)).double(), PICTURE) == []
