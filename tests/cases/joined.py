"""Channels that are added, concatenated, grouped."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.case import Net, block, case, conv, head

# Added


@case("head.2")
def residual() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.stem(x)
        x = F.relu(n.b2(n.c2(n.c1(x))) + x)
        x = F.relu(n.d2(n.d1(x)) + n.project(x))
        return n.head(x)

    return Net(
        forward, stem=block(3, 6), c1=block(6, 5), c2=conv(6 - 1, 6), b2=nn.BatchNorm2d(6), d1=block(6, 7), d2=conv(7, 8),
        project=nn.Conv2d(6, 8, 1), head=head(8),
    )  # fmt: skip


@case("head.2")
def residual_in_place() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.stem(x)
        y = n.c2(F.relu_(n.c1(x)))
        y += x
        return n.head(y.relu_())

    return Net(forward, stem=block(3, 6), c1=conv(6, 5), c2=conv(5, 6), head=head(6))


@case("head.2", "second.0")
def zero_padded_shortcut() -> nn.Module:
    """Option A of the CIFAR ResNets: the code fixes the number of zero channels, so channels added to zeros stay."""

    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.first(x)
        return n.head(n.third(F.relu(n.second(x) + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2)))))

    return Net(
        forward,
        first=block(3, 4),
        second=nn.Sequential(conv(4, 8, stride=2), nn.BatchNorm2d(8)),
        third=block(8, 5),
        head=head(5),
    )


@case("head.2")
def squeeze_and_excite() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.first(x)
        gate = torch.sigmoid(n.up(F.relu(n.down(x.mean((2, 3), keepdim=True)))))
        return n.head(n.second(x * gate))

    return Net(
        forward, first=block(3, 6), down=nn.Conv2d(6, 3, 1), up=nn.Conv2d(3, 6, 1), second=block(6, 5), head=head(5)
    )


@case("head.2", "gate")
def gate_of_one_channel() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.first(x)
        return n.head(n.second(x * torch.sigmoid(n.gate(x))))

    return Net(forward, first=block(3, 6), gate=conv(6, 1), second=block(6, 5), head=head(5))


# Concatenated


@case("head.2")
def dense() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.stem(x)
        for layer in (n.a, n.b, n.c):
            x = torch.cat([x, layer(x)], 1)
        return n.head(F.relu(n.norm(x)))

    def layer(inputs: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(), conv(inputs, 3))

    return Net(forward, stem=conv(3, 4), a=layer(4), b=layer(7), c=layer(10), norm=nn.BatchNorm2d(13), head=head(13))


@case("head.2")
def inception() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        return n.head(n.mix(torch.cat([n.a(x), n.b(x), F.max_pool2d(x, 3, 1, 1), n.c(x)], dim=1)))

    return Net(
        forward,
        a=block(3, 4, 1),
        b=nn.Sequential(block(3, 3), block(3, 5)),
        c=block(3, 2),
        mix=block(14, 6),
        head=head(6),
    )


@case("out")
def unet() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        a = n.down1(x)
        b = n.down2(F.max_pool2d(a, 2))
        c = n.bottom(F.max_pool2d(b, 2))
        b = n.up2(torch.cat([F.interpolate(c, scale_factor=2, mode="bilinear"), b], 1))
        return n.out(n.up1(torch.cat([n.grow(b), a], 1)))

    return Net(
        forward, down1=block(3, 4), down2=block(4, 5), bottom=block(5, 6), up2=block(11, 5),
        grow=nn.ConvTranspose2d(5, 4, 2, stride=2), up1=block(8, 4), out=nn.Conv2d(4, 2, 1),
    )  # fmt: skip


@case("out", example=lambda: torch.randn(3, 5, dtype=torch.double))
def stacked_and_summed() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        return n.out(torch.stack([n.a(x), n.b(x)], dim=1).tanh().sum(1))

    return Net(forward, a=nn.Linear(5, 6), b=nn.Linear(5, 6), out=nn.Linear(6, 2))


# Grouped


@case("head.2")
def depthwise() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        y = n.project(n.depth(n.expand(n.stem(x))))
        return n.head(y + n.stem(x))

    return Net(
        forward, stem=block(3, 4), expand=block(4, 6, 1), depth=block(6, 6, groups=6),
        project=nn.Sequential(conv(6, 4, 1), nn.BatchNorm2d(4)), head=head(4),
    )  # fmt: skip


@case("head.2")
def depthwise_with_multiplier() -> nn.Module:
    return Net(lambda n, x: n.head(n.depth(n.stem(x))), stem=block(3, 4), depth=block(4, 8, groups=4), head=head(8))


@case("head.2")
def grouped_whole() -> nn.Module:
    return Net(
        lambda n, x: n.head(n.b(n.a(n.stem(x)))),
        stem=block(3, 12),
        a=block(12, 12, groups=6),
        b=block(12, 5),
        head=head(5),
    )


@case("head.2")
def grouped_inside() -> nn.Module:
    return Net(
        lambda n, x: n.head(n.b(n.a(n.stem(x)))),
        stem=block(3, 12),
        a=block(12, 8, groups=2),
        b=block(8, 5),
        head=head(5),
    )


@case("head.2")
def grouped_transposed() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        return n.head(n.c(n.b(F.relu(n.a(n.stem(x))))))

    return Net(
        forward, stem=block(3, 12), a=nn.ConvTranspose2d(12, 8, 3, groups=2), b=nn.ConvTranspose2d(8, 16, 2, groups=8),
        c=block(16, 5), head=head(5),
    )  # fmt: skip


@case("head.2")
def channel_shuffle() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.a(x)
        b, c, h, w = x.shape
        x = x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)
        return n.head(n.b(n.shuffle(x)))

    return Net(forward, a=block(3, 8), shuffle=nn.ChannelShuffle(2), b=block(8, 6), head=head(6))
