"""Attention whose heads can be removed: its code follows the number of heads."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.case import Net, case, conv, head, image, tokens


class FusedHeads(nn.Module):
    """One projection for queries, keys and values; attributes state how many heads there are and how wide they all are."""

    def __init__(self, width: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim = num_heads, head_dim, num_heads * head_dim
        self.width, self.units = width, num_heads
        self.qkv, self.proj = nn.Linear(width, 3 * self.attn_dim), nn.Linear(self.attn_dim, width)
        self.q_norm = nn.LayerNorm(head_dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(self.q_norm(q), k, v, attn_mask=mask)
        return self.proj(x.transpose(1, 2).reshape(b, n, self.attn_dim))  # type: ignore[no-any-return]


class GroupedQueryHeads(nn.Module):
    """Two heads of queries to each of keys and values, rotary embeddings and a learned bias of each head."""

    rotation: Tensor

    def __init__(self, width: int, kv_heads: int, head_dim: int, length: int) -> None:
        super().__init__()
        self.head_dim, self.scale, self.units = head_dim, head_dim**-0.5, kv_heads
        self.q, self.proj = nn.Linear(width, 2 * kv_heads * head_dim), nn.Linear(2 * kv_heads * head_dim, width)
        self.k, self.v = nn.Linear(width, kv_heads * head_dim, bias=False), nn.Linear(width, kv_heads * head_dim)
        self.bias = nn.Parameter(torch.zeros(2 * kv_heads, length, length))
        self.register_buffer("rotation", torch.randn(length, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = q * self.rotation.cos() + q.flip(-1) * self.rotation.sin(), k * self.rotation.cos()
        k, v = k.repeat_interleave(2, 1), v[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)
        attention = F.dropout((q @ k.mT * self.scale + self.bias).softmax(-1), 0.0, self.training)
        return self.proj((attention @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def transformer(attention: nn.Module) -> nn.Module:
    def forward(n: Any, x: Tensor, *mask: Tensor) -> Tensor:
        x = x + n.attn(n.norm(x), *mask)
        return n.out(x.mean(1))  # type: ignore[no-any-return]

    return Net(forward, norm=nn.LayerNorm(6), attn=attention, out=nn.Linear(6, 3))


def padded() -> tuple[Tensor, Tensor]:
    """Tokens, and which of them attention may read."""
    mask = torch.ones(3, 1, 1, 5, dtype=torch.bool)
    mask[1, ..., 3:] = False
    return tokens(6), mask


@case("attn.proj", "out", in_heads=["attn.qkv"], example=padded)
def fused_heads() -> nn.Module:
    return transformer(FusedHeads(6, num_heads=4, head_dim=2))


@case("attn.proj", "out", in_heads=["attn.q", "attn.k", "attn.v"], example=lambda: tokens(6))
def grouped_query_heads() -> nn.Module:
    return transformer(GroupedQueryHeads(6, kv_heads=3, head_dim=2, length=5))


class FixedHeads(nn.Module):
    """The code fixes two heads, not their width: queries and keys, and values, lose the same position of every head."""

    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, 2 * head_dim) for _ in range(3))
        self.proj = nn.Linear(2 * head_dim, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.proj(((q @ k.mT * 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@case("attn.proj", "out", example=lambda: tokens(6))
def fixed_heads() -> nn.Module:
    return transformer(FixedHeads(6, head_dim=4))


class GroupedConvolutionHeads(nn.Module):
    """Linear attention whose queries, keys and values pass a grouped convolution too: whole groups belong to a head."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        rows, self.head_dim, self.units, self.scales = 3 * heads * head_dim, head_dim, heads, 2
        self.qkv, self.depthwise = conv(width, rows, 1), conv(rows, rows, groups=rows)
        self.grouped, self.proj = conv(rows, rows, 1, groups=3 * heads), conv(2 * heads * head_dim, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        qkv = torch.cat([qkv, self.grouped(self.depthwise(qkv))], 1)
        q, k, v = qkv.reshape(len(x), -1, 3 * self.head_dim, x[0, 0].numel()).chunk(3, 2)
        return self.proj((v @ k.relu().mT @ q.relu()).reshape(len(x), -1, *x.shape[2:]))  # type: ignore[no-any-return]


@case("1.proj", "3.2", in_heads=["1.qkv", "1.depthwise", "1.grouped"])
def grouped_convolution_heads() -> nn.Module:
    return nn.Sequential(
        nn.GroupNorm(1, 3), GroupedConvolutionHeads(3, heads=3, head_dim=6), nn.GroupNorm(1, 3), head(3)
    )


class HeadsBesideSamples(nn.Module):
    """Heads are in one dimension with the samples; attributes state how many there are and how wide they all are."""

    def __init__(self, width: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.width, self.units = num_heads, head_dim, num_heads * head_dim, num_heads
        self.q, self.kv = conv(width, self.width, 1), conv(width, 2 * self.width, 1)
        self.proj = conv(self.width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        q = self.q(x).reshape(-1, self.head_dim, h, w).reshape(b * self.num_heads, self.head_dim, -1)
        k, v = self.kv(x).reshape(b * self.num_heads, 2 * self.head_dim, -1).split([self.head_dim, self.head_dim], 1)
        return self.proj((v @ (k.mT @ q).softmax(1)).reshape(b, self.width, h, w))  # type: ignore[no-any-return]


@case("1.2", in_heads=["0.q", "0.kv"])
def heads_beside_samples() -> nn.Module:
    return nn.Sequential(HeadsBesideSamples(3, num_heads=4, head_dim=2), head(3))


class PositionBiasHeads(nn.Module):
    """The position bias of each head is a small network of coordinates, a buffer; so is a learned query of a parameter."""

    def __init__(self, width: int, heads: int, head_dim: int, length: int) -> None:
        super().__init__()
        self.head_dim, self.units, all_heads = head_dim, heads, heads * head_dim
        self.kv, self.q, self.proj = nn.Linear(width, 2 * all_heads), nn.Linear(4, all_heads), nn.Linear(all_heads, 6)
        self.query = nn.Parameter(torch.randn(2, 4))
        self.bias = nn.Sequential(nn.Linear(1, 6), nn.ReLU(), nn.Linear(6, heads, bias=False))
        self.register_buffer("coordinates", torch.randn(length, 1))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(self.query).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)
        k, v = self.kv(x).unflatten(-1, (2, -1, self.head_dim)).permute(2, 0, 3, 1, 4)
        bias = 16 * self.bias(self.coordinates).sigmoid().T[:, None]
        return self.proj(((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@case("1", in_heads=["0.q", "0.kv", "0.bias.2"], example=lambda: tokens(6))
def position_bias_heads() -> nn.Module:
    return nn.Sequential(PositionBiasHeads(6, heads=3, head_dim=2, length=5), nn.Linear(6, 3))


class PositionTable(nn.Module):
    """A learned bias of each head; a tuple states the shape. Only its method is called, not its forward."""

    index: Tensor

    def __init__(self, heads: int, length: int) -> None:
        super().__init__()
        self.shape = (length, length, heads)
        self.table = nn.Parameter(torch.randn(2 * length - 1, heads))
        self.register_buffer("index", (torch.arange(length)[:, None] - torch.arange(length) + length - 1).flatten())

    def bias(self) -> Tensor:
        return self.table[self.index].view(self.shape).permute(2, 0, 1)


class ConvolutionHeads(nn.Module):
    """Queries, keys and values of a head follow each other in one convolution, as in CoAtNet."""

    def __init__(self, width: int, num_heads: int, head_dim: int, length: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.units = num_heads, head_dim, num_heads
        self.qkv, self.proj = conv(width, 3 * num_heads * head_dim, 1), conv(num_heads * head_dim, width, 1)
        self.position = PositionTable(num_heads, length)

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        q, k, v = self.qkv(x).view(b, self.num_heads, 3 * self.head_dim, -1).chunk(3, 2)
        x = F.scaled_dot_product_attention(q.mT, k.mT, v.mT, attn_mask=self.position.bias())
        return self.proj(x.mT.reshape(b, -1, h, w))  # type: ignore[no-any-return]


@case("0.proj", "2.proj", "4.2", in_heads=["0.qkv", "2.qkv"], example=lambda: image(side=2))
def convolution_heads() -> nn.Module:
    """As many heads as positions in the second one."""
    first, second = ConvolutionHeads(3, 3, 2, length=4), ConvolutionHeads(3, 4, 2, length=4)
    return nn.Sequential(first, nn.GroupNorm(1, 3), second, nn.GroupNorm(1, 3), head(3))


class LearnedQueries(nn.Module):
    """Learned queries attend to each other, then, with a mask, to the input, as in DETR's decoder; values are checked."""

    def __init__(self, width: int, heads: int, head_dim: int, queries: int) -> None:
        super().__init__()
        self.head_dim, self.units, all_heads = head_dim, heads, heads * head_dim
        self.queries, self.norm = nn.Parameter(torch.randn(queries, width)), nn.LayerNorm(width)
        self.first = FusedHeads(width, heads, head_dim)
        self.q, self.kv = nn.Linear(width, all_heads), nn.Linear(width, 2 * all_heads)
        self.proj = nn.Linear(all_heads, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        queries = x.new_zeros(len(x), 1, 1) + self.queries
        q = self.q(self.norm(queries + self.first(queries)) + queries)
        q = q.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, -1, self.head_dim)).permute(2, 0, 3, 1, 4)
        x = self.proj(((q @ k.mT + mask.log()).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x if torch.isfinite(x).all() else x.nan_to_num()


@case("attn.first.proj", "attn.proj", "out", in_heads=["attn.first.qkv", "attn.q", "attn.kv"], example=padded)
def learned_queries() -> nn.Module:
    def forward(n: Any, x: Tensor, mask: Tensor) -> Tensor:
        return n.out(n.norm(n.attn(x, mask)))  # type: ignore[no-any-return]

    return Net(
        forward, attn=LearnedQueries(6, heads=3, head_dim=2, queries=4), norm=nn.LayerNorm(6), out=nn.Linear(6, 3)
    )
