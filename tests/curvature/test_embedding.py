"""q along the weight of an embedding that is also a Linear layer's, as language models tie them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvature_cases import ggn_quotient, gradients, hessian_quotient
from hgnp import Flatness, HgnpError

TOKENS = torch.tensor([[1, 2, 3], [4, 5, 0], [3, 3, 2], [1, 0, 0], [5, 4, 1], [2, 2, 2]])
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
ROUTES = {
    "ggn": {},
    "hessian": {"curvature": "hessian"},
    "this batch": {"direction_from": "this_batch"},
    "paper": {"flatness": "paper"},
    "network": {"direction_over": "network"},
}


class Tied(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.embedding = nn.Linear(6, 7).double(), nn.Embedding(7, 6, **options)
        self.embedding.weight = self.head.weight

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens)).mean(1))


class Indexed(Tied):
    """The same by indexing, with a constant in the place of the padding row."""

    def embed(self, tokens: Tensor) -> Tensor:
        rows, weight = self.embedding.weight[tokens], self.embedding.weight.detach()[tokens]
        padding = self.embedding.padding_idx
        return rows if padding is None else torch.where((tokens == padding).unsqueeze(-1), weight, rows)


class Called(Tied):
    """The same by torch.embedding, which takes the weight first."""

    def embed(self, tokens: Tensor) -> Tensor:
        padding = self.embedding.padding_idx
        return torch.embedding(self.embedding.weight, tokens, -1 if padding is None else padding)


def penalised(net: nn.Module, **options: Any) -> Flatness:
    flat = Flatness(net, mu=0.3, bound=-1.0, **options)
    for _ in range(2):
        net.zero_grad()
        flat.backward(TOKENS, LABELS)
    return flat


@pytest.mark.parametrize("padding", [None, 0, 2, -2])
@pytest.mark.parametrize("kind", [Tied, Called])
@pytest.mark.parametrize("route", ROUTES)
def test_q_and_its_gradient_are_those_of_an_embedding_whose_padding_row_is_constant(
    route: str, kind: type[Tied], padding: int | None
) -> None:
    net, plain = kind(padding_idx=padding), Indexed(padding_idx=padding)
    flat = penalised(net, **ROUTES[route])
    expected = hessian_quotient if flat.choices.curvature == "hessian" else ggn_quotient
    want = expected(plain, flat.direction, TOKENS, LABELS).item()
    assert flat.curvature == pytest.approx(want, rel=1e-9)
    penalised(plain, **ROUTES[route])
    torch.testing.assert_close(gradients(net), gradients(plain), rtol=1e-9, atol=1e-12)


def test_v_over_the_network_is_an_eigenvector_although_a_row_gets_no_gradient() -> None:
    net = Tied(padding_idx=0)
    flat = Flatness(net, mu=0.1, bound=-1.0, direction_over="network")
    for _ in range(200):
        flat.backward(TOKENS, LABELS)
    assert flat.residual < 1e-9
    assert flat.radius == pytest.approx(flat.curvature, rel=1e-9)


@pytest.mark.parametrize("route", ROUTES)
def test_rows_that_max_norm_has_scaled_keep_their_derivative(route: str) -> None:
    """It scales them in place before they are read; autograd does not see that."""
    net = Tied(max_norm=0.8)
    flat = penalised(net, **ROUTES[route])
    plain = Tied()
    plain.load_state_dict(net.state_dict())
    expected = hessian_quotient if flat.choices.curvature == "hessian" else ggn_quotient
    assert flat.curvature == pytest.approx(expected(plain, flat.direction, TOKENS, LABELS).item(), rel=1e-9)


@pytest.mark.parametrize("options", [{}, {"curvature": "hessian"}], ids=str)
def test_gradients_scaled_by_frequency_are_refused_before_the_first_step(options: Any) -> None:
    net = Tied(scale_grad_by_freq=True)
    with pytest.raises(HgnpError, match=r"layer 'embedding' must have scale_grad_by_freq=False .*, got True"):
        Flatness(net, bound=-1.0, **options).backward(TOKENS, LABELS)
    assert all(p.grad is None for p in net.parameters())
