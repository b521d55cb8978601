"""Random small networks: additions, concatenations, splits, norms, reshapes and shared layers in any order.

For every generated network, removing prunable neurons must equal masking them, and a saved network must load bit-equal.
The last line of the test run shows how often each ingredient occurred and what fraction of the neurons was prunable.
"""

import copy
import random
import tempfile
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hgnp
from oracles import masked, worst_error

NETWORKS = 16
"""Networks per part."""
Maps = list[Tensor]
Move = Callable[[nn.ModuleList, Maps], Tensor]


class RandomNet(nn.Module):
    """A list of moves over a growing list of feature maps (3 × C × 6 × 6), then a head.

    Moves take the modules as an argument: a copy of the network must use its own.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        self.moves: list[Move] = []
        self.ingredients: set[str] = set()
        self.widths = [3]
        self.rng = rng
        self.conv(2 * rng.randint(2, 4))
        for _ in range(rng.randint(5, 10)):
            getattr(self, rng.choice(MOVES))()
        self.head = nn.Linear(self.widths[-1], 3)
        del self.rng

    def forward(self, x: Tensor) -> Tensor:
        maps = [x]
        for move in self.moves:
            maps.append(move(self.parts, maps))
        return self.head(maps[-1].mean((2, 3)))  # type: ignore[no-any-return]

    # Ingredients. Each works on the newest map and may use an older one.

    def keep(self, module: nn.Module) -> int:
        self.parts.append(module)
        return len(self.parts) - 1

    def push(self, width: int, move: Move, ingredient: str) -> None:
        self.widths.append(width)
        self.moves.append(move)
        self.ingredients.add(ingredient)

    def use(self, module: nn.Module, width: int, ingredient: str) -> None:
        i = self.keep(module)
        self.push(width, lambda parts, maps: parts[i](maps[-1]), ingredient)

    def divisor(self) -> int:
        width = self.widths[-1]
        return self.rng.choice([g for g in range(1, width + 1) if width % g == 0])

    def conv(self, width: int | None = None) -> None:
        width = width or self.rng.randint(2, 7)
        kernel = self.rng.choice([1, 3])
        self.use(nn.Conv2d(self.widths[-1], width, kernel, padding=kernel // 2), width, "convolutions")

    def grouped(self) -> None:
        groups = self.divisor()
        width = groups * self.rng.randint(1, 2)
        self.use(nn.Conv2d(self.widths[-1], width, 3, padding=1, groups=groups), width, "grouped convolutions")

    def depthwise(self) -> None:
        width = self.widths[-1]
        self.use(nn.Conv2d(width, width, 3, padding=1, groups=width), width, "depthwise convolutions")

    def norm(self) -> None:
        width = self.widths[-1]
        kinds = [nn.BatchNorm2d, nn.InstanceNorm2d, lambda c: nn.GroupNorm(c, c), lambda c: nn.GroupNorm(1, c)]
        self.use(self.rng.choice(kinds)(width), width, "norms")

    def activation(self) -> None:
        self.use(self.rng.choice([nn.ReLU, nn.Tanh, nn.GELU, nn.Sigmoid])(), self.widths[-1], "activations")

    def add(self) -> None:
        back = self.rng.randint(0, len(self.widths) - 1)
        here, there = self.widths[-1], self.widths[back]
        if here == there and self.rng.random() < 0.5:
            self.push(here, lambda parts, maps: maps[-1] + maps[back], "sums")
        else:
            i = self.keep(nn.Conv2d(there, here, 1))
            self.push(here, lambda parts, maps: maps[-1] + parts[i](maps[back]), "sums")

    def multiply(self) -> None:
        width = self.widths[-1]
        i = self.keep(nn.Conv2d(width, width, 1))
        self.push(width, lambda parts, maps: maps[-1] * torch.sigmoid(parts[i](maps[-1].mean((2, 3), True))), "gates")

    def concatenate(self) -> None:
        back = self.rng.randint(0, len(self.widths) - 1)
        width = self.widths[-1] + self.widths[back]
        self.push(width, lambda parts, maps: torch.cat([maps[-1], maps[back]], 1), "concatenations")

    def split(self) -> None:
        width = self.widths[-1]
        if width % 2:
            return self.conv(width + 1)
        how = self.rng.choice(["gate", "swap", "glu"])
        if how == "swap":
            return self.push(width, lambda parts, maps: torch.cat(maps[-1].chunk(2, 1)[::-1], 1), "splits")
        if how == "glu":
            return self.push(width // 2, lambda parts, maps: F.glu(maps[-1], 1), "splits")
        return self.push(width // 2, lambda parts, maps: torch.mul(*maps[-1].chunk(2, 1)), "splits")

    def shuffle(self) -> None:
        groups = self.divisor()
        move: Move = lambda parts, maps: maps[-1].unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)  # noqa: E731
        self.push(self.widths[-1], move, "reshapes")

    def fold(self) -> None:
        """Space into channels and back."""
        width = self.widths[-1]
        i = self.keep(nn.Conv2d(width * 4, width * 4, 1))
        self.push(width, lambda parts, maps: F.pixel_shuffle(parts[i](F.pixel_unshuffle(maps[-1], 2)), 2), "reshapes")

    def tokens(self) -> None:
        """As a sequence of positions, through a linear layer and back."""
        width = self.rng.randint(2, 6)
        i = self.keep(nn.Linear(self.widths[-1], width))

        def through(parts: nn.ModuleList, maps: Maps) -> Tensor:
            return parts[i](maps[-1].flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, (6, 6))  # type: ignore[no-any-return]

        self.push(width, through, "reshapes")

    def pad(self) -> None:
        before, after = self.rng.randint(0, 2), self.rng.randint(0, 2)
        width = self.widths[-1] + before + after
        self.push(width, lambda parts, maps: F.pad(maps[-1], (0, 0, 0, 0, before, after)), "pads")

    def share(self) -> None:
        """One layer twice: in series."""
        width = self.widths[-1]
        i = self.keep(nn.Conv2d(width, width, 1))
        self.push(width, lambda parts, maps: parts[i](torch.tanh(parts[i](maps[-1]))), "shared layers")

    def share_back(self) -> None:
        """One layer on two maps."""
        back = self.rng.choice([i for i, w in enumerate(self.widths) if w == self.widths[-1]])
        width = self.rng.randint(2, 5)
        i = self.keep(nn.Conv2d(self.widths[-1], width, 1))
        self.push(width, lambda parts, maps: parts[i](maps[-1]) * parts[i](maps[back]), "shared layers")


MOVES = ["conv", "grouped", "depthwise", "norm", "activation", "add", "multiply", "concatenate", "split", "shuffle", "fold",
         "tokens", "pad", "share", "share_back"]  # fmt: skip


def random_network(rng: random.Random) -> RandomNet:
    torch.manual_seed(rng.randrange(1000))
    net = RandomNet(rng).double().eval()
    with torch.no_grad():
        for tensor in [*net.parameters(), *net.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5 if tensor.dim() < 2 else torch.randn_like(tensor) * 0.5)
    return net


@pytest.mark.parametrize("part", range(4))
def test_removal_equals_masking_on_random_networks(part: int, record_property: Callable[[str, object], None]) -> None:
    made: Counter[str] = Counter()
    for seed in range(part * NETWORKS, (part + 1) * NETWORKS):
        rng = random.Random(seed)
        whole = random_network(rng)
        x = torch.randn(3, 3, 6, 6, dtype=torch.double)
        small = copy.deepcopy(whole)
        neurons = hgnp.Neurons(small, x)
        made.update(["networks", *whole.ingredients])
        rows = sum(m.weight.shape[0] for m in whole.modules() if isinstance(m, nn.Conv2d | nn.Linear)) - 3
        made["at least half their neurons prunable"] += neurons.count >= rows / 2
        scores = {layer.name: torch.rand(layer.alive) for layer in neurons.layers}
        removed = neurons.remove(neurons.least(scores, max(1, int(rng.uniform(0.1, 1.0) * neurons.count))))
        made["neurons removed"] += bool(removed)
        with torch.no_grad(), masked(whole, removed, ((x,), {})):
            expected = whole(x)
        with torch.no_grad():
            assert worst_error(small(x), expected) < 1e-10, f"seed {seed}"
            with tempfile.TemporaryDirectory() as folder:
                hgnp.save(small, folder)
                again = hgnp.load(folder, copy.deepcopy(whole))
            assert torch.equal(again(x), small(x)), f"seed {seed}"
        small.train()(x).sum().backward()
    record_property("made", dict(made))
    assert {"sums", "concatenations", "splits", "norms", "reshapes", "shared layers"} <= made.keys(), made
    assert made["neurons removed"] > 0.6 * made["networks"]
