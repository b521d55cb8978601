"""`Flatness.direction` is the v of the last step."""

import pytest
import torch
from torch import Tensor, nn

import hgnp


@pytest.mark.parametrize("direction_over", ["block", "network"])
def test_the_direction_keeps_the_parts_of_parameters_that_are_frozen_after_the_step(direction_over: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    flat = hgnp.Flatness(net, mu=0.1, bound=-1.0, direction_over=direction_over)  # type: ignore[arg-type]
    flat.backward(torch.randn(8, 4).double(), torch.arange(8) % 3)
    before: dict[str, Tensor] = flat.direction
    length = sum(part.square().sum() for part in before.values())
    torch.testing.assert_close(length, torch.ones(()).double(), rtol=1e-12, atol=0)
    net[0].bias.requires_grad_(False)
    net[2].bias.requires_grad_(False)
    torch.testing.assert_close(flat.direction, before, rtol=0, atol=0)


class Tied(nn.Module):
    """A Linear layer with an embedding's weight, which comes first and gives it its name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.gate, self.head = nn.Embedding(7, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 7)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        return self.head((h + self.gate(h)).mean(1))


def at_the_head() -> tuple[Tied, hgnp.Flatness, Tensor, Tensor]:
    net = Tied().double()
    tokens, target = torch.randint(0, 7, (8, 3)), torch.randint(0, 7, (8,))
    flat = hgnp.Flatness(net, mu=0.1, bound=-1.0, refresh_every=100)
    flat.backward(tokens, target)
    flat.load_state_dict(flat.state_dict() | {"block": "head"})
    flat.backward(tokens, target)
    return net, flat, tokens, target


def test_the_direction_of_a_shared_weight_has_the_name_that_the_network_lists() -> None:
    net, flat, *_ = at_the_head()
    assert flat.block == "head"
    assert list(flat.direction) == ["embedding.weight", "head.bias"]
    named = dict(net.named_parameters())
    assert all(v.shape == named[name].shape for name, v in flat.direction.items())


def test_the_direction_of_a_shared_weight_is_cut_with_it() -> None:
    net, flat, tokens, target = at_the_head()
    before = flat.direction
    hgnp.Neurons(net, tokens).remove({"gate": [2]})
    flat.backward(tokens, target)
    assert flat.block == "head"
    want = [before["embedding.weight"][:, [0, 1, 3, 4, 5]], before["head.bias"]]
    length = sum(part.square().sum() for part in want) ** 0.5
    torch.testing.assert_close(list(flat.direction.values()), [part / length for part in want], rtol=1e-9, atol=1e-12)
