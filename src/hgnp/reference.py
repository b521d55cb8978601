"""Algorithms 1 and 2 of the paper, a page each: dense, slow, and the first file to read. It needs PyTorch alone.

The rest of hgnp computes the same numbers faster, for more networks and with more choices: `hgnp.prune` with
`Recipe(flatness="paper", schedule="constant")` equals `prune` below once both use the same eigensolver, which is an argument.
The tests check that in float64.

    C         task loss, the mean over the N samples of a batch: cross-entropy
    a, s      input and output (pre-activation) of a layer; ã = a, in a convolution a patch of a, with a 1 appended for the bias
    Ψ, Γ      second moments of ã and of g = N·∂C/∂s: the Kronecker factors of the layer's K-FAC block Ψ ⊗ Γ
    λ, v      top eigenpair of the block with the largest eigenvalue; v is zero in all other blocks
    q, B, μ   curvature q = vᵀHv of C along v, with v held fixed; its bound and the weight of the penalty
    L         penalised loss C + μ·max(0, q − B)
    m         masks: m_l^j is 1 while neuron j of layer l lives and 0 once it is pruned (the paper's M_B)
    κ         fraction of the parameters that is left

Algorithm 1 is `train`, with `penalized_loss` at its heart, for any network of Linear and Conv2d without groups, each called
once in a forward pass, whose only norms are BatchNorm. Algorithm 2 is `prune`, for an nn.Sequential of these, elementwise
activations, pooling and Flatten.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Layer = nn.Linear | nn.Conv2d
Norm = nn.BatchNorm1d | nn.BatchNorm2d
Masks = dict[str, Tensor]
"""Layer name → m, (neurons,)."""
Eigenvectors = dict[str, tuple[Tensor, Tensor]]
"""Layer name → v^Ψ, (inputs,), and v^Γ, (outputs,)."""
Eigensolver = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(factor, start) → the largest eigenvalue and its unit eigenvector. `start` is where an iterative solver may begin: the
eigenvector of the batch before, masked but not normalised, or None."""


def eigh(factor: Tensor, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The top eigenpair by a full decomposition."""
    values, vectors = torch.linalg.eigh(factor)
    return values[-1], vectors[:, -1]


# ------------------------------------------------ Algorithm 1: training ------------------------------------------------


@dataclass(frozen=True)
class Penalized:
    """L of a batch, and its parts."""

    objective: Tensor  # L, to be differentiated
    loss: Tensor  # C
    curvature: Tensor  # q
    radius: Tensor  # λ = λ^Ψ·λ^Γ
    block: str  # the layer that v lies in
    direction: list[Tensor]  # v, in the shapes of that layer's weight and bias
    eigenvectors: Eigenvectors  # of all layers


def train(
    net: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], optimizer: torch.optim.Optimizer, eigenvectors: Eigenvectors,
    **penalty: Any,
) -> None:  # fmt: skip
    """Algorithm 1, one epoch: W ← W − α·∇L for each batch, or what the optimizer makes of ∇L.

    `eigenvectors` are those of the last batch, replaced after each batch; `penalty` is passed to `penalized_loss`."""
    net.train()
    for x, y in batches:
        optimizer.zero_grad()
        penalized = penalized_loss(net, x, y, starts=eigenvectors, **penalty)
        penalized.objective.backward()
        optimizer.step()
        eigenvectors.update(penalized.eigenvectors)


def penalized_loss(
    net: nn.Module, x: Tensor, y: Tensor, *, mu: float = 1e-3, bound: float = 0.5, eigensolver: Eigensolver = eigh,
    starts: Eigenvectors | None = None,
) -> Penalized:  # fmt: skip
    """L = C + μ·max(0, q − B) along the batch's own v (equations 2 to 4), through which no derivative of L passes."""
    layers = {name: module for name, module in net.named_modules() if isinstance(module, Layer)}
    with recorded(layers) as (inputs, outputs), PrimitiveBatchNorm():
        loss = F.cross_entropy(net(x), y)
    # of C alone: those of L would feed the penalty back into its own direction
    gradients = torch.autograd.grad(loss, [outputs[name] for name in layers], retain_graph=True)

    radii, eigenvectors = {}, {}
    for (name, layer), gradient in zip(layers.items(), gradients, strict=True):
        psi, gamma = kronecker_factors(layer, inputs[name], len(x) * gradient)
        start = (starts or {}).get(name, (None, None))
        (psi_value, v_psi), (gamma_value, v_gamma) = eigensolver(psi, start[0]), eigensolver(gamma, start[1])
        radii[name], eigenvectors[name] = psi_value * gamma_value, (v_psi, v_gamma)

    block = max(radii, key=lambda name: float(radii[name]))
    v = kronecker_vector(layers[block], *eigenvectors[block])
    q = rayleigh_quotient(loss, list(layers[block].parameters()), v)
    return Penalized(loss + mu * torch.relu(q - bound), loss.detach(), q.detach(), radii[block], block, v, eigenvectors)


@torch.no_grad()
def kronecker_factors(layer: Layer, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of a layer (equation 3), with sums over its T output positions ("expand"; T = 1 for most Linears):

        Ψ = (1/N) Σ_i Σ_t ã_it ã_itᵀ,  (inputs, inputs)        Γ = (1/NT) Σ_i Σ_t g_it g_itᵀ,  (outputs, outputs)

    a is the layer's input, and g = N·∂C/∂s has the shape of its output; samples come first in both."""
    samples = len(a)
    if isinstance(layer, nn.Conv2d):
        if layer.groups != 1 or isinstance(layer.padding, str) or layer.padding_mode != "zeros":
            raise ValueError(f"Conv2d must have one group and plain zero padding, got {layer}; use hgnp.Flatness")
        a = F.unfold(a, layer.kernel_size, layer.dilation, layer.padding, layer.stride).mT  # patches: (N, T, C·kh·kw)
        g = g.flatten(2).mT  # (N, T, outputs)
    a, g = a.flatten(0, -2), g.flatten(0, -2)  # (N·T, …)
    if layer.bias is not None:
        a = F.pad(a, (0, 1), value=1.0)
    return a.T @ a / samples, g.T @ g / len(g)


def kronecker_vector(layer: Layer, v_psi: Tensor, v_gamma: Tensor) -> list[Tensor]:
    """v = v^Ψ ⊗ v^Γ (equation 4), in the shapes of the layer's weight and bias."""
    v = torch.outer(v_gamma, v_psi)  # (outputs, inputs); the last column belongs to the bias
    if layer.bias is None:
        return [v.view_as(layer.weight)]
    return [v[:, :-1].reshape(layer.weight.shape), v[:, -1]]


def rayleigh_quotient(loss: Tensor, parameters: list[nn.Parameter], v: list[Tensor]) -> Tensor:
    """q = vᵀHv with Hv = ∇(vᵀ∇C), still to be differentiated: a third derivative of C."""
    gradient = torch.autograd.grad(loss, parameters, create_graph=True)
    product = torch.autograd.grad(gradient, parameters, v, create_graph=True)
    return torch.stack([(a * b).sum() for a, b in zip(v, product, strict=True)]).sum()


@contextmanager
def recorded(layers: Mapping[str, Layer]) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """A forward pass inside the block leaves the inputs a and the outputs s of all layers here."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    calls = Counter[str]()

    def record(name: str, layer: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        calls[name] += 1
        inputs[name], outputs[name] = args[0].detach(), output
        return output.clone()  # an in-place activation after the layer must not change s

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(record, name)))
        yield inputs, outputs
    for name in layers:
        if calls[name] != 1:
            raise ValueError(f"a pass must call layer {name!r} once, got {calls[name]} calls; use hgnp.Flatness")


class PrimitiveBatchNorm(TorchFunctionMode):
    """Inside the block BatchNorm is `batch_norm` below: PyTorch's own has silently wrong third derivatives in training mode,
    because the statistics that it saves for its backward pass carry no history."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))


def batch_norm(
    x: Tensor, mean: Tensor | None, var: Tensor | None, weight: Tensor | None, bias: Tensor | None, training: bool,
    momentum: float, eps: float,
) -> Tensor:  # fmt: skip
    """weight·(x − E x)/√(Var x + ε) + bias for each channel, of elementary operations."""
    if not training:
        return F.batch_norm(x, mean, var, weight, bias, False, momentum, eps)
    F.batch_norm(x.detach(), mean, var, training=True, momentum=momentum)  # updates the running mean and var
    dims, shape = [0, *range(2, x.dim())], [1, -1] + [1] * (x.dim() - 2)
    y = x - x.mean(dims, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(dims, keepdim=True) + eps)
    return y if weight is None or bias is None else y * weight.view(shape) + bias.view(shape)


# ------------------------------------------------ Algorithm 2: pruning -------------------------------------------------


@dataclass(frozen=True)
class Round:
    """A round of pruning."""

    epoch: int
    masks: Masks  # m after it
    kept: float  # κ after it


def prune(
    net: nn.Sequential, loader: Iterable[tuple[Tensor, Tensor]], optimizer: torch.optim.Optimizer, *, keep: float,
    warmup_epochs: int, prune_every: int, neurons_per_round: int, finetune_epochs: int, **penalty: Any,
) -> list[Round]:  # fmt: skip
    """Algorithm 2 with κ̄ = keep, E1 = warmup_epochs, E2 = prune_every, N = neurons_per_round and E3 = finetune_epochs.

    Trains `net`, prunes it until κ ≤ κ̄, and fine-tunes it. Neurons are scored on the first mini-batch of the epoch, a random
    one if the loader shuffles. Every layer keeps a neuron, and the last round prunes no more than κ̄ needs.

    A pruned neuron is masked: its output is read as zero, which equals its physical removal by `hgnp.prune`."""
    layers, parameters = chain(net), sum(p.numel() for p in net.parameters())
    masks = {name: layers[name].weight.detach().new_ones(len(layers[name].weight)) for name, _ in pairwise(layers)}
    one_each = {name: m[:1] for name, m in masks.items()}  # one living neuron in each layer
    least = parameters_left(net, one_each) / parameters
    if keep < least:
        raise ValueError(f"keep must be at least {least:.4f}, with which every layer has one neuron, got {keep}")
    eigenvectors: Eigenvectors = {}
    rounds: list[Round] = []

    epoch, kept = 0, 1.0
    while kept > keep:
        batches = list(loader)  # the batch that is scored is the first to be trained on
        if epoch >= warmup_epochs and epoch % prune_every == 0:
            pruned = 0
            scores = sensitivity(net, *batches[0], masks, **penalty)
            for name, j in least_important_first(scores, masks):
                if pruned < neurons_per_round and kept > keep and masks[name].sum() > 1:
                    masks[name][j] = 0
                    pruned += 1
                    kept = parameters_left(net, masks) / parameters
            zero_pruned(layers, masks, eigenvectors)
            rounds.append(Round(epoch, {name: m.clone() for name, m in masks.items()}, kept))
        with gated(layers, masks):
            train(net, batches, optimizer, eigenvectors, **penalty)
        epoch += 1
    for _ in range(finetune_epochs):
        with gated(layers, masks):
            train(net, loader, optimizer, eigenvectors, **penalty)
    zero_pruned(layers, masks, eigenvectors)  # momentum has moved some weights since; from now on there are no gates
    return rounds


def sensitivity(net: nn.Sequential, x: Tensor, y: Tensor, masks: Masks, **penalty: Any) -> dict[str, Tensor]:
    """How much L changes when a neuron's output is attenuated (equation 6): layer name → scores, (neurons,).

    A gate γ_i^j multiplies what the next layer reads of neuron j in sample i, after norm and activation. At γ = m,

        δ_i^j = N·∂L/∂γ_i^j,     score_j = (1/N) Σ_i |δ_i^j|,     divided by the L2 norm of the layer's scores.

    In evaluation mode, where BatchNorm does not mix samples; then the network is in training mode again."""
    gates = {name: m.repeat(len(x), 1).requires_grad_() for name, m in masks.items()}
    net.eval()
    with gated(chain(net), gates):
        objective = penalized_loss(net, x, y, **penalty).objective
    net.train()
    deltas = torch.autograd.grad(objective, list(gates.values()))
    scores = {name: (len(x) * d).abs().mean(0) * masks[name] for name, d in zip(gates, deltas, strict=True)}
    smallest = torch.finfo(x.dtype).tiny  # the scores of a layer without influence are zero
    return {name: score / score.norm().clamp_min(smallest) for name, score in scores.items()}


def least_important_first(scores: Mapping[str, Tensor], masks: Masks) -> list[tuple[str, int]]:
    """(layer name, neuron) of all living neurons of the network."""
    living = [(name, j) for name, m in masks.items() for j in m.nonzero().flatten().tolist()]
    return sorted(living, key=lambda neuron: float(scores[neuron[0]][neuron[1]]))


def parameters_left(net: nn.Module, masks: Masks) -> int:
    """‖W ⊙ M‖₀: a pruned neuron takes its row, its bias, its entries of norms and the columns that read it with it."""
    left, share = 0, 1.0  # share: fraction of the neurons of the layer before that live
    for name, module in net.named_modules():
        if isinstance(module, Layer):
            alive = int(masks[name].sum()) if name in masks else len(module.weight)
            left += alive * (round(share * module.weight[0].numel()) + (module.bias is not None))
            share = alive / len(module.weight)
        elif isinstance(module, Norm):
            left += round(share * sum(p.numel() for p in module.parameters()))
    return left


def gated(layers: Mapping[str, Layer], gates: Mapping[str, Tensor]) -> ExitStack:
    """Inside the block every layer reads the n neurons of the layer before it through their gates, (n,) or (N, n)."""

    def multiply(gate: Tensor, reader: nn.Module, args: tuple[Tensor]) -> Tensor:
        (a,) = args  # (N, n, height, width), or (N, n·positions) after Flatten
        if isinstance(reader, nn.Linear) and a.dim() != 2:
            raise ValueError(f"Linear must read (samples, features), got {tuple(a.shape)}; use hgnp.prune")
        return (a.reshape(len(a), gate.shape[-1], -1) * gate.unsqueeze(-1)).view_as(a)

    hooks = ExitStack()
    for name, reader in pairwise(layers):
        hooks.enter_context(layers[reader].register_forward_pre_hook(partial(multiply, gates[name])))
    return hooks


@torch.no_grad()
def zero_pruned(layers: Mapping[str, Layer], masks: Masks, eigenvectors: Eigenvectors) -> None:
    """Zeroes the columns of weights that read pruned neurons, and the entries of eigenvectors that belong to them."""
    for name, reader in pairwise(layers):
        m, weight = masks[name], layers[reader].weight
        weight.view(len(weight), len(m), -1).mul_(m.unsqueeze(1))
        if eigenvectors:
            (_, v_gamma), (v_psi, _) = eigenvectors[name], eigenvectors[reader]
            v_gamma.mul_(m)
            v_psi[: weight[0].numel()].view(len(m), -1).mul_(m.unsqueeze(1))  # the entry after them is the bias's


CHANNELWISE = (
    nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Tanh,
    nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveMaxPool2d, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Sequential,
)  # fmt: skip


def chain(net: nn.Sequential) -> dict[str, Layer]:
    """The layers, in the order in which they run. The neurons of all but the last may be pruned."""
    layers: dict[str, Layer] = {}
    for name, module in net.named_modules(remove_duplicate=False):
        if isinstance(module, Layer) and module not in layers.values():
            layers[name] = module
        elif type(module) not in CHANNELWISE and not (isinstance(module, Norm) and module.track_running_stats):
            raise ValueError(
                "net must be an nn.Sequential of Linear, Conv2d, BatchNorm with running statistics, elementwise activations, "
                f"pooling and Flatten, each layer once, got {name or 'net'}: {type(module).__name__}; use hgnp.prune"
            )
    return layers
