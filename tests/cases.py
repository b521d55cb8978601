"""The test zoo: small networks, one for each way in which channels meet.

`CASES[name]` makes a network (float64, every parameter and statistic random), an example input, and the set of layers that
must be frozen; every other layer must be prunable.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CASES: dict[str, "Case"] = {}


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    example: Callable[[], Any]
    frozen: frozenset[str]
    approximate: bool

    def net(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        net = self.make().double()
        with torch.no_grad():
            for tensor in [*net.parameters(), *net.buffers()]:
                if tensor.is_floating_point():
                    tensor.copy_(torch.rand_like(tensor) + 0.5 if tensor.dim() < 2 else torch.randn_like(tensor) * 0.3)
        return net

    def inputs(self, seed: int = 1) -> tuple[tuple[Any, ...], dict[str, Any]]:
        torch.manual_seed(seed)
        example = self.example()
        if isinstance(example, dict):
            return (), example
        return (example if isinstance(example, tuple) else (example,)), {}


def case(*frozen: str, example: Callable[[], Any] | None = None, approximate: bool = False) -> Callable[[Any], Any]:
    """Register a factory. `frozen`: layers that must stay; the rest must be prunable."""

    def register(make: Any) -> Any:
        name = make.__name__
        CASES[name] = Case(name, make, example or (lambda: image()), frozenset(frozen), approximate)
        return make

    return register


def image(channels: int = 3, side: int = 8, batch: int = 3) -> Tensor:
    return torch.randn(batch, channels, side, side, dtype=torch.double)


def tokens(features: int = 12, length: int = 5, batch: int = 3) -> Tensor:
    return torch.randn(batch, length, features, dtype=torch.double)


class Net(nn.Module):
    """Modules by keyword and a forward by function: the shortest way to write a network down."""

    def __init__(self, forward: Callable[..., Any], **modules: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self._forward = forward
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self, *args, **kwargs)


def conv(inputs: int, outputs: int, kernel: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **options)


def block(inputs: int, outputs: int, kernel: int = 3, **options: Any) -> nn.Sequential:
    return nn.Sequential(conv(inputs, outputs, kernel, **options), nn.BatchNorm2d(outputs), nn.ReLU())


def head(features: int, classes: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, classes))


# Plain


@case("4", example=lambda: torch.randn(6, 5, dtype=torch.double))
def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6, bias=False), nn.GELU(), nn.Linear(6, 3))


@case("7", example=lambda: torch.randn(6, 5, dtype=torch.double))
def mlp_with_norms_and_odd_activations() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Sigmoid(), nn.Linear(7, 6), nn.Softplus(), nn.PReLU(6),
        nn.Dropout(0.0), nn.Linear(6, 3),
    )  # fmt: skip


@case("6")
def vgg_like() -> nn.Module:
    return nn.Sequential(
        block(3, 6), nn.MaxPool2d(2), block(6, 8), nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(0.0), nn.Linear(32, 4)
    )


@case("4", example=lambda: torch.randn(3, 2, 9, dtype=torch.double))
def conv1d() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(18, 4))


@case("5", example=lambda: torch.randn(2, 2, 5, 5, 5, dtype=torch.double))
def conv3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 6, 3), nn.BatchNorm3d(6), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(6, 5), nn.Linear(5, 4)
    )


@case("4")
def transposed() -> nn.Module:
    return nn.Sequential(
        conv(3, 6), nn.ReLU(), nn.ConvTranspose2d(6, 5, 2, stride=2), nn.BatchNorm2d(5), nn.ConvTranspose2d(5, 2, 3)
    )


@case("3.2")
def instance_norm() -> nn.Module:
    return nn.Sequential(
        conv(3, 6), nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
        nn.Sequential(conv(6, 5), nn.InstanceNorm2d(5)), head(5),
    )  # fmt: skip


@case("8", example=lambda: torch.randn(2, 3, 8, dtype=torch.double))
def every_activation() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 6, 3), nn.LeakyReLU(), nn.Conv1d(6, 6, 1), nn.Hardswish(), nn.Conv1d(6, 6, 1),
        nn.Sequential(nn.SiLU(), nn.Mish(), nn.ELU(), nn.CELU(), nn.SELU(), nn.Softsign(), nn.Tanhshrink(), nn.RReLU(0.2, 0.2)),
        nn.Conv1d(6, 6, 1),
        nn.Sequential(nn.ReLU6(), nn.Hardtanh(), nn.Softshrink(0.1), nn.Hardshrink(0.1), nn.Threshold(0.1, 0.0)),
        nn.Conv1d(6, 2, 1),
    )  # fmt: skip


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
    """Option A of the CIFAR ResNets: the code fixes how many zero channels there are, so channels beside zeros stay."""

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


# Reshaped


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
def view_that_follows() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.a(x)
        return n.out(n.b(x.view(x.size(0), x.size(1) * 64)))

    return Net(forward, a=conv(3, 6), b=nn.Linear(384, 5), out=nn.Linear(5, 2))


@case("out", "a")
def fixed_split() -> nn.Module:
    """The first three channels are summed: which those are would change."""

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
def weighted_by_place() -> nn.Module:
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
    """A dead channel adds nothing to a sum or a 2-norm."""

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


# Mixed by a norm


@case("0", "4.2")
def group_norm() -> nn.Module:
    return nn.Sequential(conv(3, 8), nn.GroupNorm(4, 8), nn.ReLU(), block(8, 5), head(5))


@case("3")
def group_norm_of_single_channels() -> nn.Module:
    return nn.Sequential(conv(3, 6), nn.GroupNorm(6, 6), nn.Tanh(), conv(6, 2))


@case("0", "5", example=lambda: tokens())
def layer_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 6), nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5), nn.Linear(5, 2)
    )


@case("0", "5", example=lambda: tokens())
def rms_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 6), nn.RMSNorm(6), nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 5), nn.Linear(5, 2))


@case("4.2", approximate=True)
def group_norm_approximate() -> nn.Module:
    return nn.Sequential(conv(3, 8), nn.GroupNorm(4, 8), nn.ReLU(), block(8, 5), head(5))


@case("3", example=lambda: tokens(), approximate=True)
def layer_norm_approximate() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 6), nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 2))


@case("3", example=lambda: tokens(), approximate=True)
def rms_norm_approximate() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 6), nn.RMSNorm(6), nn.Linear(6, 8), nn.Linear(8, 2))


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
    """A decoder with the encoder's weight: rows here are columns there."""

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
def meets_an_input() -> nn.Module:
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


@case("attention.out_proj", "down", "out", example=lambda: tokens())
def attention() -> nn.Module:
    def forward(n: Any, x: Tensor) -> Tensor:
        x = x + n.attention(x, x, x, need_weights=False)[0]
        return n.out(x + n.down(F.gelu(n.up(x))))

    return Net(
        forward, attention=nn.MultiheadAttention(12, 3, batch_first=True), up=nn.Linear(12, 16), down=nn.Linear(16, 12),
        out=nn.Linear(12, 2),
    )  # fmt: skip


@case("0.self_attn.out_proj", "0.linear2", "1", example=lambda: tokens())
def transformer_encoder_layer() -> nn.Module:
    return nn.Sequential(
        nn.TransformerEncoderLayer(12, 3, dim_feedforward=10, dropout=0.0, batch_first=True), nn.Linear(12, 2)
    )


@case("q", "k", "v", "out", example=lambda: tokens())
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
