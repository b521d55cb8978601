"""Small networks and independent oracles for the tests of curvature and flatness, in float64."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hgnp import Flatness
from hgnp.curvature.direction import BlockChoice
from hgnp.curvature.eigen import Eigenpair
from hgnp.curvature.factors import Factor, find_blocks
from hgnp.curvature.step import Plan
from hgnp.flatness import step_and_state

torch.set_num_threads(1)

CHOICES = {
    "default": {},
    "this batch": {"direction_from": "this_batch"},
    "hessian": {"curvature": "hessian"},
    "sampled": {"fisher_type": "mc"},
    "empirical": {"ranking": "empirical"},
    "penalised": {"gamma_from": "penalized_loss"},
    "expand, scale invariant": {"kfac_approx": "expand", "scaling": "scale_invariant"},
    "paper": {"flatness": "paper"},
}


class RMSNorm(nn.Module):
    """nn.RMSNorm over the last dimension of a map whose channels come second."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "layer": lambda c: nn.LayerNorm([c, 6, 6]),
    "instance": lambda c: nn.InstanceNorm2d(c, affine=True),
    "group": lambda c: nn.GroupNorm(2, c),
    "rms": RMSNorm,
    "none": lambda c: nn.Identity(),
}


def convnet(norm: str = "batch", activation: Callable[[], nn.Module] = nn.Tanh, dropout: float = 0.0) -> nn.Sequential:
    """Two convolutions (the second grouped) with norms, pooling and a Linear; random affine parts and buffers."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), NORMS[norm](4), activation(), nn.Dropout(dropout),
        nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False), NORMS[norm](4), activation(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 3),
    ).double()  # fmt: skip
    return shaken(net)


def shaken(net: nn.Module) -> nn.Module:
    """Every parameter and statistic moved off its special initial value."""
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.2 * torch.randn_like(p))
        for name, buffer in net.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.rand_like(buffer) + 0.5 if "var" in name else 0.3 * torch.randn_like(buffer))
    return net


def images(n: int = 5) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(n, 2, 6, 6, dtype=torch.float64), torch.randint(0, 3, (n,))


def begin_step(flat: Flatness, inputs: Tensor, target: Tensor, block: str | None = None) -> None:
    """The stages of a step before q: v is that of this batch, in `block`, whichever block has the largest λ."""
    step, state = step_and_state(flat)
    step.plan(state)
    step.share(state, inputs, target)
    step.prepare(state, inputs, target)
    if not step.lagged:
        step.forward(state, inputs, target)
        step.backward_loss_and_refresh(state, target)
    if block is not None:
        state.direction.choice = BlockChoice.known(next(b for b in find_blocks(flat.net) if b.name == block))


def finish_step(flat: Flatness, inputs: Tensor, target: Tensor) -> Tensor:
    """The stages from q on, without a refresh. Returns C."""
    step, state = step_and_state(flat)
    try:
        if step.lagged:
            state.plan = Plan(penalty=True, refresh=False)
            step.forward(state, inputs, target)
            step.decide(state)
            step.backward_and_refresh(state, target, mu=state.mu, active=state.active())
        else:
            step.tangents(state, inputs, target)
            step.decide(state)
            step.backward_penalty(state, mu=state.mu, active=state.active())
        assert state.loss is not None
        return state.loss
    finally:
        state.release()


def top_dense(factor: Factor) -> Eigenpair:
    """The top eigenpair by a full decomposition of the dense factor."""
    values, vectors = torch.linalg.eigh(factor.dense())
    return Eigenpair(values[:, -1], vectors[..., -1], torch.zeros_like(values[:, -1]))


def gradients(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def loss_of_block(net: nn.Module, names: list[str], x: Tensor, y: Tensor, loss=F.cross_entropy):
    """The loss, and the output, as functions of the flattened parameters `names` alone."""
    fixed = {k: v.detach() for k, v in net.named_parameters()}
    buffers = {k: v.clone() for k, v in net.named_buffers()}
    shapes = {k: fixed[k].shape for k in names}

    def output(flat: Tensor) -> Tensor:
        parts = flat.split([s.numel() for s in shapes.values()])
        moved = {k: part.view(s) for (k, s), part in zip(shapes.items(), parts, strict=True)}
        with sdpa_kernel(SDPBackend.MATH):
            return torch.func.functional_call(net, fixed | moved | {k: v.clone() for k, v in buffers.items()}, (x,))

    start = torch.cat([fixed[k].flatten() for k in names])
    return start, output, lambda flat: loss(output(flat), y)


def flat_direction(direction: dict[str, Tensor]) -> Tensor:
    return torch.cat([d.flatten() for d in direction.values()])


def hessian_quotient(
    net: nn.Module, direction: dict[str, Tensor], x: Tensor, y: Tensor, loss=F.cross_entropy
) -> Tensor:
    """vᵀHv from the dense Hessian of the block."""
    start, _, value = loss_of_block(net, list(direction), x, y, loss)
    v = flat_direction(direction)
    return v @ torch.autograd.functional.hessian(value, start) @ v


def ggn_quotient(net: nn.Module, direction: dict[str, Tensor], x: Tensor, y: Tensor, loss=F.cross_entropy) -> Tensor:
    """(Jv)ᵀ(∂²C/∂z²)(Jv) from the dense Jacobian and the dense Hessian of the loss."""
    start, output, _ = loss_of_block(net, list(direction), x, y)
    u = torch.autograd.functional.jacobian(output, start).flatten(0, -2) @ flat_direction(direction)
    z = output(start).detach()
    H = torch.autograd.functional.hessian(lambda flat: loss(flat.view(z.shape), y), z.flatten())
    return u @ H @ u


def central(q: Callable[[float], float], h: float) -> float:
    """q'(0) to fourth order."""
    return (8 * (q(h) - q(-h)) - (q(2 * h) - q(-2 * h))) / (12 * h)


class Series(nn.Module):
    """One layer used twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.twice(F.relu(self.twice(x)))))


class Siamese(nn.Module):
    """One layer used side by side on two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(F.relu(self.tower(left)) + F.relu(self.tower(right)))


class Gated(nn.Module):
    """Squeeze and excite: a product of two things that depend on the same layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.squeeze, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.body(x))
        gate = F.leaky_relu(self.squeeze(y.mean((2, 3))))
        return self.head((y * gate[:, :, None, None]).mean((2, 3)))


class Residual(nn.Module):
    """Additions, concatenation, pooling, grouped convolution, in-place ReLU: piecewise linear in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.deep, self.side = nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.Conv2d(4, 2, 1)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(54, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.stem(x)), inplace=True)
        y = y + F.leaky_relu(self.deep(y))
        y = torch.cat([y, self.side(y)], 1)
        y = F.max_pool2d(y, 2)
        return self.head(self.drop(y).flatten(1))


class Attention(nn.Module):
    """A transformer block on the rows of an image, with separate projections."""

    def __init__(self, activation=F.gelu) -> None:
        super().__init__()
        self.embed, self.norm1, self.norm2 = nn.Linear(12, 8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x.transpose(1, 2).flatten(2))  # 6 tokens of 12
        q, k, v = self.qkv(self.norm1(y)).view(*y.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(y.shape)
        y = y + self.out(attended)
        y = y + self.down(self.activation(self.up(self.norm2(y))))
        return self.head(y.mean(1))


LOSSES = {
    "smoothed": functools.partial(F.cross_entropy, label_smoothing=0.1),
    "weighted": functools.partial(
        F.cross_entropy, weight=torch.tensor([0.5, 2.0, 1.3], dtype=torch.float64), label_smoothing=0.2
    ),
    "ignored": functools.partial(F.cross_entropy, ignore_index=1),
}


class Twice(torch.autograd.Function):
    """2x, which PyTorch does not show to a mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]
