"""Channels that are split, rearranged and reduced."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.case import Net, block, case, conv, head


@case("head.2")
def chunk_and_gate() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        a, b = n.first(x).chunk(2, dim=1)
        return n.head(n.third(F.glu(n.second(a * torch.sigmoid(b)), dim=1)))

    return Net(forward, first=conv(3, 8), second=conv(4, 10), third=block(5, 6), head=head(6))


@case("head.2")
def chunk_apart() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        a, b = n.first(x).chunk(2, dim=1)
        return n.head(torch.cat([n.second(a), b], 1))

    return Net(forward, first=conv(3, 8), second=conv(4, 5), head=head(9))


@case("head.2")
def pixel_shuffle() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        return n.head(n.last(F.pixel_unshuffle(n.mid(F.pixel_shuffle(n.first(x), 2)), 2)))

    return Net(forward, first=conv(3, 12), mid=block(3, 4), last=block(16, 5), head=head(5))


@case("out")
def permuted() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.a(x).permute(0, 2, 3, 1)
        x = n.b(x).relu().movedim(-1, 1)
        x = F.pad(x, (1, 1, 0, 0), mode="reflect")
        x = torch.flip(torch.roll(x, 1, dims=2), dims=[3])
        return n.out(x.flatten(2).transpose(1, 2).mean(1))

    return Net(forward, a=conv(3, 6), b=nn.Linear(6, 5), out=nn.Linear(5, 2))


@case("out", "a")
def hard_coded_view() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        return n.out(n.b(n.a(x).view(-1, 6 * 64)))

    return Net(forward, a=conv(3, 6), b=nn.Linear(384, 5), out=nn.Linear(5, 2))


@case("out")
def view_by_width() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.a(x)
        return n.out(n.b(x.view(x.size(0), x.size(1) * 64)))

    return Net(forward, a=conv(3, 6), b=nn.Linear(384, 5), out=nn.Linear(5, 2))


@case("out", "a")
def fixed_split() -> nn.Module:
    """The first three channels are summed: a removal would change which those are."""

    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.a(x)
        return n.out(n.b(x).mean((2, 3))) + 0.01 * x[:, :3].sum((1, 2, 3)).unsqueeze(1)

    return Net(forward, a=conv(3, 6), b=block(6, 5), out=nn.Linear(5, 2))


@case("out", "a")
def scaled_by_width() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.a(x)
        return n.out(n.b(x / x.size(1) ** 0.5).mean((2, 3)))

    return Net(forward, a=conv(3, 6), b=block(6, 5), out=nn.Linear(5, 2))


@case("out", "a")
def weighted_by_position() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.a(x)
        return n.out(
            n.b(x * torch.linspace(0, 1, x.size(1), dtype=x.dtype, device=x.device).view(1, -1, 1, 1)).mean((2, 3))
        )

    return Net(forward, a=conv(3, 6), b=block(6, 5), out=nn.Linear(5, 2))


@case("out", "a")
def averaged_over_channels() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.a(x)
        return n.out(n.b(x * torch.sigmoid(x.mean(1, keepdim=True) + x.amax(1, keepdim=True))).mean((2, 3)))

    return Net(forward, a=conv(3, 6), b=block(6, 5), out=nn.Linear(5, 2))


@case("out")
def summed_over_channels() -> nn.Module:
    """A removed channel adds nothing to a sum or a 2-norm."""

    def forward(n: Any, x: Tensor) -> Tensor:
        x = F.normalize(n.a(x).tanh(), dim=1)
        return n.out(n.b(x * x.sum(1, keepdim=True)).mean((2, 3)))

    return Net(forward, a=conv(3, 6), b=block(6, 5), out=nn.Linear(5, 2))


@case("out")
def unfolded() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.a(x)
        patches = F.unfold(x, 3, padding=1)
        x = F.fold(patches, (8, 8), 3, padding=1)
        return n.out(n.b(x).mean((2, 3)))

    return Net(forward, a=conv(3, 6), b=block(6, 5), out=nn.Linear(5, 2))
