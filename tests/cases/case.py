"""A case of the zoo, its registration, and the building blocks of its networks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CASES: dict[str, "Case"] = {}


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    example: Callable[[], Any]
    frozen: frozenset[str]
    approximate: bool
    in_heads: frozenset[str]
    """Layers whose rows all belong to heads of an attention module."""

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


def case(
    *frozen: str, example: Callable[[], Any] | None = None, approximate: bool = False, in_heads: Sequence[str] = ()
) -> Callable[[Any], Any]:
    """Registers a network's factory. `frozen`: layers that must be frozen; the rest must be prunable."""

    def register(make: Any) -> Any:
        name = make.__name__
        CASES[name] = Case(
            name, make, example or (lambda: image()), frozenset(frozen), approximate, frozenset(in_heads)
        )
        return make

    return register


def image(channels: int = 3, side: int = 8, batch: int = 3) -> Tensor:
    return torch.randn(batch, channels, side, side, dtype=torch.double)


def tokens(features: int = 12, length: int = 5, batch: int = 3) -> Tensor:
    return torch.randn(batch, length, features, dtype=torch.double)


class Net(nn.Module):
    """A network from modules, by keyword, and a forward function."""

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
