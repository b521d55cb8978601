"""Widths that modules state in integers, or take from another tensor."""

from typing import Any

import torch
from torch import Tensor, nn

from cases.case import Net, block, case, conv, head


class SplitBlock(nn.Module):
    """Half of the channels, as an attribute says, goes through more layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c = width // 2
        self.first, self.inside, self.last = block(3, width), block(self.c, self.c), block(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).split((self.c, self.c), 1)
        return self.last(torch.cat([a, b + self.inside(b)], 1))  # type: ignore[no-any-return]


@case("head.2")
def split_by_an_attribute() -> nn.Module:
    return Net(lambda n, x: n.head(n.split(x)), split=SplitBlock(12), head=head(5))


@case("head.2")
def split_by_attributes_twice() -> nn.Module:
    """Two modules of one class."""

    def forward(n: Any, x: Tensor) -> Tensor:
        return n.head(torch.cat([n.one(x), n.two(x)], 1))

    return Net(forward, one=SplitBlock(12), two=SplitBlock(8), head=head(10))


class Paths(nn.Module):
    """Res2Net's chain: parts of equal width, each added to what the last became. The attribute counts all of them."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.channels, self.parts = width, parts
        self.first, self.last = block(3, width), block(width, 5)
        self.inside = nn.ModuleList(block(width // parts, width // parts) for _ in range(parts - 1))

    def forward(self, x: Tensor) -> Tensor:
        pieces = self.first(x).split(self.channels // self.parts, 1)
        done = [pieces[0]]
        for piece, layer in zip(pieces[1:], self.inside, strict=True):
            done.append(layer(piece + done[-1]))
        return self.last(torch.cat(done, 1))  # type: ignore[no-any-return]


@case("head.2")
def split_into_parts_of_an_attribute() -> nn.Module:
    return Net(lambda n, x: n.head(n.paths(x)), paths=Paths(12, 3), head=head(5))


class SpatialAttention(nn.Module):
    """Attention as YOLO11 has it: the width of its output is that of its input, and values are convolved beside it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.key_dim = heads, width // heads, width // heads // 2
        self.scale = self.key_dim**-0.5
        self.qkv = conv(width, width + 2 * self.key_dim * heads, 1)
        self.around, self.proj = conv(width, width, groups=width), conv(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        qkv = self.qkv(x).view(b, self.num_heads, self.key_dim * 2 + self.head_dim, h * w)
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.head_dim], 2)
        attention = ((q * self.scale).mT @ k).softmax(-1)
        return self.proj((v @ attention.mT).view(b, c, h, w) + self.around(v.reshape(b, c, h, w)))  # type: ignore[no-any-return]


class AttentionBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c = width // 2
        self.first, self.last = block(3, width), block(width, 5)
        self.attention = SpatialAttention(self.c, 2)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).split((self.c, self.c), 1)
        return self.last(torch.cat([a, b + self.attention(b)], 1))  # type: ignore[no-any-return]


@case("head.2")
def attention_of_the_inputs_width() -> nn.Module:
    return Net(lambda n, x: n.head(n.attend(x)), attend=AttentionBlock(16), head=head(5))


class ScaledSplit(nn.Module):
    """The attribute is a factor too: masked channels would have another one."""

    def __init__(self) -> None:
        super().__init__()
        self.c = 6
        self.first, self.last = conv(3, 12), conv(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).split((self.c, self.c), 1)
        return self.last(torch.cat([a, b / self.c], 1))  # type: ignore[no-any-return]


@case("scaled.first", "head.2")
def split_and_scaled_by_an_attribute() -> nn.Module:
    return Net(lambda n, x: n.head(n.scaled(x)), scaled=ScaledSplit(), head=head(5))


class Selective(nn.Module):
    """A softmax over paths weighs each channel of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.paths = nn.ModuleList(block(3, width, kernel) for kernel in (1, 3))
        self.squeeze, self.select = block(width, 4, 1), conv(4, 2 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        each = torch.stack([path(x) for path in self.paths], 1)
        weights = self.select(self.squeeze(each.sum(1).mean((2, 3), keepdim=True)))
        shape = weights.shape[0], 2, weights.shape[1] // 2, 1, 1
        return (each * weights.view(shape).softmax(1)).sum(1)


@case("head.2")
def softmax_over_paths() -> nn.Module:
    return Net(lambda n, x: n.head(n.select(x)), select=Selective(6), head=head(6))


@case("a.0", "head.2")
def two_groups_of_fixed_size() -> nn.Module:
    """Of two groups one could be removed, but `view` then takes pixels for the other."""

    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.a(x)
        return n.head(nn.functional.normalize(x.view(len(x), 2, 4, -1), dim=2).view(x.shape))  # type: ignore[no-any-return]

    return Net(forward, a=block(3, 8), head=head(8))
