"""Shared weights, several inputs and outputs, sequences."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.case import Net, block, case, conv, image, tokens

# Shared and reused


@case("out", example=lambda: torch.randn(3, 6, dtype=torch.double))
def reused_in_series() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.a(x).tanh()
        return n.out(n.loop(n.loop(x).tanh()).tanh())

    return Net(forward, a=nn.Linear(6, 5), loop=nn.Linear(5, 5), out=nn.Linear(5, 2))


@case("out", example=lambda: (torch.randn(3, 6, dtype=torch.double), torch.randn(3, 6, dtype=torch.double)))
def siamese() -> nn.Module:
    def forward(n: Any, a: Tensor, b: Tensor) -> Tensor:
        return n.out((n.tower(a) - n.tower(b)).abs())

    return Net(forward, tower=nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7)), out=nn.Linear(7, 2))


@case("decode", example=lambda: torch.randn(3, 6, dtype=torch.double))
def tied_weights() -> nn.Module:
    """A decoder with the encoder's weight: the rows of one are the columns of the other."""

    class Decoder(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    encode = nn.Linear(6, 5)
    return Net(lambda n, x: n.decode(n.encode(x).tanh()), encode=encode, decode=Decoder(encode.weight))


@case("out", example=lambda: torch.randn(3, 6, dtype=torch.double))
def two_layers_one_weight() -> nn.Module:
    net = Net(
        lambda n, x: n.out(torch.cat([n.a(x), n.b(x)], 1).tanh()),
        a=nn.Linear(6, 5),
        b=nn.Linear(6, 5),
        out=nn.Linear(10, 2),
    )
    net.b.weight = net.a.weight  # type: ignore[union-attr]
    return net


# Several inputs and outputs


@case("heads.a", "heads.b", example=lambda: {"picture": image(), "numbers": torch.randn(3, 4, dtype=torch.double)})
def dictionaries() -> nn.Module:
    def forward(n: Any, picture: Tensor, numbers: Tensor) -> dict[str, Tensor]:
        x = n.eye(picture).mean((2, 3)) * n.ear(numbers)
        return {name: n.heads[name](x) for name in n.heads}

    heads = nn.ModuleDict({"a": nn.Linear(6, 2), "b": nn.Linear(6, 3)})
    return Net(forward, eye=block(3, 6), ear=nn.Linear(4, 6), heads=heads)


@case("out", "side", example=lambda: image())
def auxiliary_head_in_training() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Any:
        x = n.a(x)
        y = n.out(n.b(x).mean((2, 3)))
        return (y, n.side(n.branch(x).mean((2, 3)))) if n.training else y

    return Net(forward, a=block(3, 6), b=block(6, 5), branch=block(6, 4), side=nn.Linear(4, 2), out=nn.Linear(5, 2))


@case("out", "features.0", example=lambda: image())
def features_returned() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Any:
        x = n.features(x)
        return n.out(n.b(x).mean((2, 3))), {"features": [x]}

    return Net(forward, features=block(3, 6), b=block(6, 5), out=nn.Linear(5, 2))


@case("out", "project", example=lambda: (image(), image(6)))
def added_to_an_input() -> nn.Module:
    def forward(n: Any, x: Tensor, offset: Tensor) -> Tensor:
        return n.out(n.b(torch.cat([n.project(x) + offset, n.a(x), x], 1)).mean((2, 3)))

    return Net(forward, project=conv(3, 6), a=block(3, 4), b=block(13, 5), out=nn.Linear(5, 2))


# Sequences


@case("embed", "out", example=lambda: tokens())
def lstm() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        hidden = n.lstm(n.embed(x))[0]
        return n.out(F.relu(n.mid(n.gru(hidden)[0])))

    return Net(
        forward, embed=nn.Linear(12, 6), lstm=nn.LSTM(6, 5, batch_first=True), gru=nn.GRU(5, 4, batch_first=True),
        mid=nn.Linear(4, 7), out=nn.Linear(7, 2),
    )  # fmt: skip


@case("out", example=lambda: tokens())
def recurrence_from_zeros() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), n.h.in_features)
        for t in range(x.shape[1]):
            h = torch.tanh(n.x(x[:, t]) + n.h(h))
        return n.out(h)

    return Net(forward, x=nn.Linear(12, 7), h=nn.Linear(7, 7), out=nn.Linear(7, 2))


def recurrence_from_a_constant(value: float) -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        h = torch.full((len(x), n.h.in_features), value, dtype=x.dtype, device=x.device)
        for t in range(x.shape[1]):
            h = torch.tanh(n.x(x[:, t]) + n.h(h))
        return n.out(h)

    return Net(forward, x=nn.Linear(12, 7), h=nn.Linear(7, 7), out=nn.Linear(7, 2))


@case("out", example=lambda: tokens())
def recurrence_from_a_constant_of_zero() -> nn.Module:
    return recurrence_from_a_constant(0.0)


@case("x", "h", "out", example=lambda: tokens())
def recurrence_from_a_constant_of_one() -> nn.Module:
    return recurrence_from_a_constant(1.0)


class _LSTM(nn.Module):
    """Its state has the width that an attribute states."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.x, self.h = width, nn.Linear(12, 4 * width), nn.Linear(width, 4 * width)
        self.out = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = c = self.h.weight.new_zeros(2, len(x), self.width)[1]
        for t in range(x.shape[1]):
            i, f, g, o = (self.x(x[:, t]) + self.h(h)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.out(h)


@case("out", example=lambda: tokens())
def lstm_by_hand() -> nn.Module:
    return _LSTM(6)


@case("out", example=lambda: image())
def convolutional_recurrence_from_zeros() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), n.h.in_channels, *x.shape[2:], dtype=x.dtype, device=x.device)
        for _ in range(3):
            h = torch.tanh(n.x(x) + n.h(h))
        return n.out(h.mean((2, 3)))

    return Net(forward, x=conv(3, 6), h=conv(6, 6), out=nn.Linear(6, 2))


@case("attention", "attention.out_proj", "down", "out", example=lambda: tokens())
def attention() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        x = x + n.attention(x, x, x, need_weights=False)[0]
        return n.out(x + n.down(F.gelu(n.up(x))))

    return Net(
        forward, attention=nn.MultiheadAttention(12, 3, batch_first=True), up=nn.Linear(12, 16), down=nn.Linear(16, 12),
        out=nn.Linear(12, 2),
    )  # fmt: skip


@case("0.self_attn", "0.self_attn.out_proj", "0.linear2", "1", example=lambda: tokens())
def transformer_encoder_layer() -> nn.Module:
    return nn.Sequential(
        nn.TransformerEncoderLayer(12, 3, dim_feedforward=10, dropout=0.0, batch_first=True), nn.Linear(12, 2)
    )


@case("", "out", in_heads=["q", "k", "v"], example=lambda: tokens())
def attention_by_hand() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (layer(x).view(b, t, 3, 4).transpose(1, 2) for layer in (n.q, n.k, n.v))
        x = n.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))
        return n.out(F.silu(n.gate(x)) * n.up(x))

    return Net(
        forward, q=nn.Linear(12, 12), k=nn.Linear(12, 12), v=nn.Linear(12, 12), o=nn.Linear(12, 12),
        gate=nn.Linear(12, 9), up=nn.Linear(12, 9), out=nn.Linear(9, 2),
    )  # fmt: skip
