"""The textbook step of HGNP, to measure the library's own against: flatness="paper" written down as the paper reads.

For a batch of N samples, with T positions where a layer is a convolution:

    1  forward, and the loss's derivative g = N·∂C/∂s at the output s of every layer
    2  Ψ = (1/N) Σ ã ãᵀ from all patches ã = [patch; 1], Γ = (1/NT) Σ g gᵀ: dense matrices
    3  every eigenvalue and eigenvector of every factor; the block with the largest λ^Ψ·λ^Γ, v = v^Ψ ⊗ v^Γ there
    4  q = vᵀHv by differentiating twice, and the gradient of C + μ·max(0, q − B) by a third backward

It shares no code with the library. For networks of Linear, Conv2d without groups and BatchNorm.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Layers = dict[str, nn.Linear | nn.Conv2d]


@dataclass(frozen=True)
class Naive:
    """What a step found; the gradient is in `.grad`."""

    loss: Tensor
    block: str
    radius: Tensor
    direction: list[Tensor]
    curvature: Tensor


def naive_step(net: nn.Module, x: Tensor, y: Tensor, *, mu: float = 1e-3, bound: float = 0.5) -> Naive:
    """Adds the gradient of C + μ·max(0, vᵀHv − B) to `.grad`."""
    layers: Layers = {name: m for name, m in net.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    with observed(layers) as seen, PrimitiveBatchNorm():
        loss = F.cross_entropy(net(x), y)
    outputs = [seen[name][1] for name in layers]
    slopes = torch.autograd.grad(loss, outputs, retain_graph=True)

    radius, block, pair = None, "", (x, x)
    for (name, layer), slope in zip(layers.items(), slopes, strict=True):
        (psi_value, psi), (gamma_value, gamma) = (top(f) for f in factors(layer, seen[name][0], slope * len(x)))
        if radius is None or psi_value * gamma_value > radius:
            radius, block, pair = psi_value * gamma_value, name, (psi, gamma)
    assert radius is not None, "the network has no Linear and no Conv2d"
    parameters, v = spread(layers[block], *pair)

    gradient = torch.autograd.grad(loss, parameters, create_graph=True)
    product = torch.autograd.grad(dot(gradient, v), parameters, create_graph=True)
    q = dot(product, v)
    (loss + mu * torch.relu(q - bound)).backward()
    return Naive(loss.detach(), block, radius, v, q.detach())


@contextmanager
def observed(layers: Layers) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Layer → its input and its output in the forward pass inside the block."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = []
    for name, layer in layers.items():

        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, name: str = name) -> Tensor:
            seen[name] = inputs[0].detach(), output
            return output.clone()  # an activation in place must not change what was seen

        hooks.append(layer.register_forward_hook(hook))
    try:
        yield seen
    finally:
        for handle in hooks:
            handle.remove()


@torch.no_grad()
def factors(layer: nn.Linear | nn.Conv2d, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Ψ and Γ, dense. Samples and positions are rows here: (N·T, side)."""
    if isinstance(layer, nn.Conv2d):
        if layer.groups != 1:
            raise ValueError(f"a convolution has {layer.groups} groups; 1 would do")
        a = F.unfold(a, layer.kernel_size, layer.dilation, layer.padding, layer.stride).transpose(1, 2).flatten(0, 1)
        samples, g = len(g), g.flatten(2).transpose(1, 2).flatten(0, 1)
    else:
        samples, a, g = len(g), a.flatten(0, -2), g.flatten(0, -2)
    if layer.bias is not None:
        a = F.pad(a, (0, 1), value=1.0)
    return a.T @ a / samples, g.T @ g / len(g)


@torch.no_grad()
def top(factor: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(factor)
    return values[-1], vectors[:, -1]


def spread(layer: nn.Linear | nn.Conv2d, psi: Tensor, gamma: Tensor) -> tuple[list[nn.Parameter], list[Tensor]]:
    """The block's parameters, and v in their shapes."""
    v = torch.outer(gamma, psi)
    if layer.bias is None:
        return [layer.weight], [v.view_as(layer.weight)]
    return [layer.weight, layer.bias], [v[:, :-1].reshape(layer.weight.shape), v[:, -1]]


def dot(left: Any, right: Any) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(left, right, strict=True)]).sum()


class PrimitiveBatchNorm(TorchFunctionMode):
    """BatchNorm in training, in plain operations: the third derivatives of PyTorch's own are wrong without a word."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))


def batch_norm(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, training: bool, momentum: float, eps: float
) -> Tensor:
    assert training
    dims = (0, 2, 3)
    m = x.mean(dims, keepdim=True)
    s = (x - m).square().mean(dims, keepdim=True)
    with torch.no_grad():
        n = x.numel() / x.shape[1]
        mean.lerp_(m.flatten(), momentum)
        var.lerp_(s.flatten() * n / (n - 1), momentum)
    shape = (1, -1, 1, 1)
    return (x - m) * torch.rsqrt(s + eps) * weight.view(shape) + bias.view(shape)
