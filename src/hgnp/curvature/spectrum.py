"""Each block's top eigenpair, and the block they point to.

λ_l = λ^Ψ λ^Γ and v_l = v^Ψ ⊗ v^Γ (equation 4), for every group of every block; v is the one with the largest score and
zero everywhere else. `Observer` is what a forward pass shows its layers to: it gathers Ψ on the way and Γ in `pull`.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hgnp.curvature.blocks import Block
from hgnp.curvature.branches import Branches
from hgnp.curvature.eigen import Eigenpair, arbitrary
from hgnp.curvature.factors import unit
from hgnp.curvature.forward import autocast_off
from hgnp.curvature.late import Late
from hgnp.curvature.moments import GammaMoments, PsiMoments, per_position, plain_convolution
from hgnp.curvature.wide import HALF, wide


class _Probe(torch.autograd.Function):
    """The identity on a layer's output; its backward shows the derivative there. `anchor` makes autograd go by it."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, anchor: Tensor, sink: Any) -> Tensor:
        ctx.sink = sink
        ctx.mark_dirty(s)
        return s

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.sink(grads[0])
        return grads[0], None, None


class Observer:
    """Gathers the factors of every block that a forward pass calls."""

    def __init__(
        self, blocks: Iterable[Block], samples: int, *, kfac_approx: str, scale_invariant: bool, keep: bool
    ) -> None:
        self._blocks = {id(block.weight): block for block in blocks}
        self.samples, self.kfac_approx, self.keep = samples, kfac_approx, keep
        self.scale_invariant = scale_invariant
        self.psi: dict[str, PsiMoments] = {}
        self.gamma: dict[str, GammaMoments] = {}
        self.calls: dict[str, list[tuple[dict[str, Any], Tensor]]] = {}
        self.when_gathered: Callable[[], None] | None = None
        """Called once a backward pass has shown the derivatives of all calls."""
        self._anchor: Tensor | None = None
        self._factor: float | Tensor | None = None  # N / scale while Γ is being gathered
        self._probes = self._unseen = 0
        self._branches = Branches(lane=True)
        self._read: Tensor | None = None  # by the branch that is open

    def layer(self, options: dict[str, Any], out: Tensor) -> Tensor:
        block = self._blocks.get(id(options["weight"]))
        if block is None or not out.requires_grad:
            return out
        a = options["input"].detach()  # what is kept must not keep the graph, which keeps us
        with autocast_off(out):
            a = a.to(out.dtype) if out.dtype in HALF else a  # as autocast has the layer read it
            options = options | {"input": a}
            if block.name not in self.psi:
                scale = wide(block.filter_norms().detach()) if self.scale_invariant else None
                self.psi[block.name] = PsiMoments(block, self.samples, self.kfac_approx)
                self.gamma[block.name] = GammaMoments(block, self.samples, self.kfac_approx, scale)
            self.psi[block.name].add(options)
        if self._anchor is None:
            self._anchor = torch.zeros((), device=out.device, requires_grad=True)

        self._probes += 1

        def sink(g: Tensor) -> None:
            if self._factor is None:
                return
            self.join()  # of the derivative before
            self._unseen -= 1
            with self._branches.branch():
                self.gamma[block.name].add(g, self._factor)
                if self.keep:
                    self.calls.setdefault(block.name, []).append((options, wide(g) * self._factor))
                if self._unseen == 0 and self.when_gathered is not None:
                    self.when_gathered()
            self._read = g

        probed: Tensor = _Probe.apply(out, self._anchor, sink)
        return probed

    def begin(self) -> None:
        """Lets go of what another backward pass has shown."""
        for moments in self.gamma.values():
            moments.begin()
        self.calls = {}

    @contextlib.contextmanager
    def gathering(self, scale: float | Tensor) -> Iterator[None]:
        """Γ from the derivatives that a backward pass within shows, of scale·C: it is divided out again."""
        self._factor = self.samples / (wide(scale) if isinstance(scale, Tensor) else scale)
        self._unseen = self._probes
        try:
            yield
        finally:
            self._factor = None

    def join(self) -> None:
        """What follows runs after all that has been gathered."""
        self._branches.join()
        self._read = None

    def pull(self, output: Tensor, cotangent: Tensor | None, scale: float | Tensor) -> None:
        """Γ from the derivatives of `output` (C itself, or the logits with a drawn cotangent): a backward pass for
        activations alone. `scale` keeps them in a half-precision range."""
        assert self._anchor is not None
        cotangent = torch.ones_like(output) if cotangent is None else cotangent.to(output.dtype)
        with self.gathering(scale):
            torch.autograd.grad(output, self._anchor, cotangent * scale, retain_graph=True, allow_unused=True)

    def empirical(self, block: Block, psi: Tensor, gamma: Tensor) -> Tensor:
        """mean_i (Σ_t (v^Ψ·ã_it)(v^Γ·g_it))² of each group, (G,): the quotient of the block's own Fisher matrix."""
        groups, side = block.gamma_shape
        total = torch.zeros(self.samples, groups, dtype=psi.dtype, device=psi.device)
        d = block.weight[0].numel()
        shift = psi[:, d] if block.bias is not None else None
        for options, g in self.calls.get(block.name, []):
            a = wide(options["input"].detach())
            if "stride" in options:
                a, conv = plain_convolution(a, options, block.weight.dim() - 2)
                filters = psi[:, :d].reshape(groups, *block.weight.shape[1:])
                zeros = [0] * len(conv["stride"])
                along = torch.convolution(a, filters, shift, conv["stride"], conv["padding"], conv["dilation"], False, zeros, groups)  # fmt: skip # noqa: E501
            else:
                along = torch.nn.functional.linear(a, psi[:, :d], shift)
            g = per_position(g, self.samples, block)
            scale = self.gamma[block.name].scale
            g = g if scale is None else g * scale
            along_g = (g.unflatten(2, (groups, side)) * gamma).sum(3)  # (N, T, G)
            total += (per_position(along, self.samples, block) * along_g).sum(1)
        return total.square().mean(0)


@dataclass(frozen=True)
class Chosen:
    """The block with the largest score."""

    index: Late  # into `blocks`
    blocks: list[Block]

    @classmethod
    def of(cls, index: Tensor, blocks: list[Block]) -> "Chosen":
        return cls(Late.of(index), blocks)

    @classmethod
    def known(cls, block: Block) -> "Chosen":
        return cls(Late.of(torch.tensor(0)), [block])

    def block(self) -> Block:
        return self.blocks[int(self.index.item())]


@dataclass(frozen=True)
class Pair:
    psi: Eigenpair
    gamma: Eigenpair
    group: Tensor  # index of the best group

    @property
    def value(self) -> Tensor:
        values = self.psi.value * self.gamma.value
        return values[0] if len(values) == 1 else values.gather(0, self.group.view(1)).squeeze(0)

    @property
    def residuals(self) -> Tensor:
        """Of v^Ψ and v^Γ."""
        both = torch.stack((self.psi.residual, self.gamma.residual))
        if both.shape[1] == 1:
            return both[:, 0]
        return both.index_select(1, self.group.view(1)).squeeze(1)

    def direction(self, block: Block, *, scale_invariant: bool) -> list[tuple[Tensor, Tensor]]:
        """The block's parameters with their parts of v, or of V = diag(n)·v, through whose n derivatives pass."""
        psi, gamma = self.psi.vector, self.gamma.vector
        if len(gamma) > 1:
            gamma = gamma * torch.zeros_like(self.psi.value).scatter(0, self.group.view(1), 1.0).unsqueeze(1)
        if scale_invariant:
            psi, gamma = psi.clone(), gamma.clone()  # autograd keeps them, and they may be renewed in place meanwhile
            gamma = gamma * block.filter_norms().view(gamma.shape)
        weight, bias = block.spread(psi.to(gamma.dtype), gamma)
        seeds = [(block.weight, weight.to(block.weight.dtype))]
        if block.bias is not None and bias is not None:
            seeds.append((block.bias, bias.to(block.bias.dtype)))
        return seeds

    def fits(self, block: Block) -> bool:
        return (self.psi.vector.shape, self.gamma.vector.shape) == (block.psi_shape, block.gamma_shape)

    def state(self) -> dict[str, Tensor]:
        kinds = {"psi": self.psi, "gamma": self.gamma}
        parts = {f"{kind}.{key}": value for kind, pair in kinds.items() for key, value in vars(pair).items()}
        return parts | {"group": self.group}

    @classmethod
    def of_state(cls, state: dict[str, Tensor]) -> "Pair":
        psi, gamma = (
            Eigenpair(**{key: state[f"{kind}.{key}"] for key in ("value", "vector", "residual")})
            for kind in ("psi", "gamma")
        )
        return cls(psi, gamma, state["group"])

    def sliced(self, block: Block, outputs: Tensor | None, inputs: Tensor | None) -> "Pair":
        """The pair after the block's weight keeps these positions of its dimensions 0 and 1 (None: all).

        Whole groups may go with their outputs, as in depthwise convolutions."""
        psi, gamma = self.psi.vector, self.gamma.vector
        group, value = self.group, {"psi": self.psi.value, "gamma": self.gamma.value}
        residual = {"psi": self.psi.residual, "gamma": self.gamma.residual}
        if outputs is not None:
            outputs = outputs.to(gamma.device)
            alive = torch.unique(torch.div(outputs, gamma.shape[1], rounding_mode="floor"))
            gamma = gamma.flatten()[outputs].view(len(alive), -1)
            psi, group = psi[alive], torch.searchsorted(alive, group).clamp_max(len(alive) - 1)
            value = {kind: x[alive] for kind, x in value.items()}
            residual = {kind: x[alive] for kind, x in residual.items()}
        if inputs is not None:
            d = block.weight[0].numel()
            taps = psi[:, :d].view(psi.shape[0], block.weight.shape[1], -1)[:, inputs.to(psi.device)]
            psi = torch.cat([taps.flatten(1), psi[:, d:]], 1)
        return Pair(
            Eigenpair(value["psi"], _unit_or_arbitrary(psi), residual["psi"]),
            Eigenpair(value["gamma"], _unit_or_arbitrary(gamma), residual["gamma"]),
            group,
        )


def _unit_or_arbitrary(v: Tensor) -> Tensor:
    return unit(torch.where(v.abs().amax(1, keepdim=True) == 0, arbitrary(v.shape[1], v.dtype, v.device), v))


def choose_block(
    observer: Observer, blocks: list[Block], psi: Sequence[Eigenpair], gamma: Sequence[Eigenpair], *, empirical: bool
) -> tuple[dict[str, Pair], Chosen]:
    """The blocks' pairs, and the block to penalise."""
    if empirical:
        scores = torch.cat(
            [observer.empirical(b, p.vector, g.vector) for b, p, g in zip(blocks, psi, gamma, strict=True)]
        )
    else:
        scores = torch.cat([each.value for each in psi]) * torch.cat([each.value for each in gamma])
    scores = torch.nan_to_num(scores, nan=-1.0, posinf=-1.0)  # an overflow of half precision is no curvature
    first = torch.zeros((), dtype=torch.long, device=scores.device)
    groups, best = [first] * len(blocks), scores
    if any(block.groups > 1 for block in blocks):
        tops = [part.max(0) for part in scores.split([block.groups for block in blocks])]
        groups, best = [each.indices for each in tops], torch.stack([each.values for each in tops])
    pairs = {b.name: Pair(p, g, group) for b, p, g, group in zip(blocks, psi, gamma, groups, strict=True)}
    return pairs, Chosen.of(best.argmax(), blocks)
