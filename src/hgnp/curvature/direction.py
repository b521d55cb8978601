"""The direction v: every block's top Kronecker eigenpair, kept from batch to batch, and the block that v lies in.

The eigenpair of block l (equation 4) is

    λ_l = λ^Ψ λ^Γ,   v_l = v^Ψ ⊗ v^Γ;

v is that of the block with the largest λ_l and zero everywhere else. `refresh` solves for the eigenpairs of a batch from where
the last batch left them, and chooses the block.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hgnp.curvature.autodiff.forward import autocast_off
from hgnp.curvature.collector import FactorCollector
from hgnp.curvature.device import HostScalar, SideStreams, capturing, flags_to_tensor, upcast
from hgnp.curvature.eigen import Eigenpair, arbitrary, top_of_each, top_of_lists
from hgnp.curvature.factors import Block, WholeNetwork, find_blocks, unit
from hgnp.errors import InputError
from hgnp.reducer import LOCAL, Reducer


def _no_block(collector: FactorCollector) -> str:
    """Why no block has factors."""
    if collector.psi:
        return "loss must depend on a Linear or convolution layer that net calls, got none; set mu=0"
    for name, rows in collector.left_out.items():
        return (
            f"net must call a layer on a multiple of the batch's {collector.samples} samples, got {rows} rows in {name!r}; "
            "samples are the first dimension of the first tensor, or the entries of a list"
        )
    return (
        "net must multiply with a Linear or convolution layer's own weight, where PyTorch shows it, got none; pass a scripted "
        "network as the plain module, or set mu=0 where all weights are computed (masks, weight norm, functional_call)"
    )


@dataclass(frozen=True)
class KroneckerEigenpair:
    """The top eigenpair of each group of a block, and the group that ranks first: by λ, unless ranking="empirical"."""

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

    def tangents(self, block: Block, *, scale_invariant: bool) -> list[tuple[Tensor, Tensor]]:
        """The block's parameters with their parts of v, or of V = diag(n)·v, through whose n derivatives pass."""
        psi, gamma = self.psi.vector, self.gamma.vector
        if len(gamma) > 1:
            gamma = gamma * torch.zeros_like(self.psi.value).scatter(0, self.group.view(1), 1.0).unsqueeze(1)
        if scale_invariant:
            # autograd keeps them, and a refresh may write them in place meanwhile
            psi, gamma = psi.clone(), gamma.clone()
            gamma = gamma * block.filter_norms().view(gamma.shape)
        weight, bias = block.spread(psi.to(gamma.dtype), gamma)
        tangents = [(block.weight, weight.to(block.weight.dtype))]
        if block.bias is not None and bias is not None:
            tangents.append((block.bias, bias.to(block.bias.dtype)))
        return tangents

    def fits(self, block: Block) -> bool:
        return (self.psi.vector.shape, self.gamma.vector.shape) == (block.psi_shape, block.gamma_shape)

    def state(self) -> dict[str, Tensor]:
        kinds = {"psi": self.psi, "gamma": self.gamma}
        parts = {f"{kind}.{key}": value for kind, pair in kinds.items() for key, value in vars(pair).items()}
        return parts | {"group": self.group}

    @classmethod
    def of_state(cls, state: Mapping[str, Tensor]) -> "KroneckerEigenpair":
        psi, gamma = (
            Eigenpair(**{key: state[f"{kind}.{key}"] for key in ("value", "vector", "residual")})
            for kind in ("psi", "gamma")
        )
        return cls(psi, gamma, state["group"])

    def sliced(self, block: Block, outputs: Tensor | None, inputs: Tensor | None) -> "KroneckerEigenpair":
        """The pair after the block's weight keeps these positions of its dimensions 0 and 1 (None: all), to unit length again.

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
        return KroneckerEigenpair(
            Eigenpair(value["psi"], _unit_or_arbitrary(psi), residual["psi"]),
            Eigenpair(value["gamma"], _unit_or_arbitrary(gamma), residual["gamma"]),
            group,
        )


def _unit_or_arbitrary(v: Tensor) -> Tensor:
    return unit(torch.where(v.abs().amax(1, keepdim=True) == 0, arbitrary(v.shape[1], v.dtype, v.device), v))


@dataclass(frozen=True)
class BlockChoice:
    """The block that ranks first, an index that may still be on its way from the device."""

    index: HostScalar
    """Into `blocks`; −1: no score is finite, and the block stays."""
    blocks: Sequence[Block | WholeNetwork]
    last: str | None = None
    """Name of the block chosen before."""

    @classmethod
    def of(cls, index: Tensor, blocks: Sequence[Block | WholeNetwork], *, after: "BlockChoice | None") -> "BlockChoice":
        """Reads the choice before it. The host need not wait for that any more: this step or the last one has used it."""
        return cls(HostScalar.of(index), blocks, None if after is None else after.block().name)

    @classmethod
    def known(cls, block: Block | WholeNetwork) -> "BlockChoice":
        return cls(HostScalar.of(torch.tensor(0)), [block])

    def block(self) -> Block | WholeNetwork:
        """Waits for the index."""
        index = int(self.index.item())
        if index >= 0:
            return self.blocks[index]
        return next((block for block in self.blocks if block.name == self.last), self.blocks[0])


@dataclass
class Direction:
    """v of the batches so far, in one block. `network_direction.NetworkDirection` is v over all trained parameters."""

    net: nn.Module
    pairs: dict[str, KroneckerEigenpair] = field(default_factory=dict)
    """Block → its eigenpair."""
    choice: BlockChoice | None = None

    def copy(self) -> "Direction":
        """One to refresh from these eigenpairs while this one stays as it is. Its refresh chooses the block: none is yet."""
        return Direction(self.net, dict(self.pairs))

    def along(self, block: Block | WholeNetwork, pair: Mapping[str, Tensor]) -> "Direction":
        """One along this pair of a block, given as its `state()`."""
        return Direction(self.net, {block.name: KroneckerEigenpair.of_state(pair)}, BlockChoice.known(block))

    def name(self) -> str | None:
        """Of the block that v lies in. Waits for the last choice."""
        return None if self.choice is None else self.choice.block().name

    def block(self) -> Block | None:
        """The block that v lies in, unless it is gone, frozen or of another shape by now."""
        name = self.name()
        block = next((block for block in find_blocks(self.net) if block.name == name), None)
        return block if block is not None and self.pairs[block.name].fits(block) else None

    def refresh(
        self,
        collector: FactorCollector,
        collect: Callable[[], None],
        *,
        cold: bool,
        empirical: bool,
        overlap: Callable[[], None] | None = None,
        reducer: Reducer = LOCAL,
    ) -> None:
        """Eigenpairs and block of the batch whose forward pass the collector has observed. Ranks may have called different
        layers.

        collect    a backward pass, in which the collector gets the derivatives of C
        cold       as many products as without eigenpairs to start from; `eigen` has the numbers
        overlap    work of the step that needs nothing of the new v; it runs beside the solver where that is possible
        empirical  ranks blocks by the quotient of their own Fisher matrix along v_l instead of λ_l
        """
        if reducer.ranks > 1:
            self._refresh_ranks(collector, collect, cold, empirical, overlap, reducer)
            return
        streams = SideStreams()
        blocks = [block for block in find_blocks(self.net) if block.name in collector.psi]
        if not blocks:
            raise InputError(_no_block(collector))
        starts = [self._start(block) for block in blocks]
        like = blocks[0].weight
        gamma: list[Eigenpair] = []
        differentiated: list[int] = []
        """Numbers of the blocks that C depends on."""
        with streams.fork(), torch.no_grad(), autocast_off(like):
            psi_factors = [collector.psi[block.name].factor() for block in blocks]
            psi = top_of_each(psi_factors, [start for start, _ in starts], cold=cold)

        def solve() -> None:
            differentiated.extend(n for n, block in enumerate(blocks) if collector.gamma[block.name].positions)
            if not differentiated:
                raise InputError(_no_block(collector))
            with torch.no_grad(), autocast_off(like):
                gamma_factors = [collector.gamma[blocks[n].name].factor() for n in differentiated]
                gamma.extend(top_of_each(gamma_factors, [starts[n][1] for n in differentiated], cold=cold))

        collector.when_complete = solve  # while the backward pass still has something to do
        try:
            collect()
        finally:
            collector.when_complete = None  # a reference cycle
        if not gamma:  # some layers got no derivative
            collector.join()
            with streams.fork():
                solve()
        if overlap is not None:
            overlap()
        collector.join()
        streams.join()
        with torch.no_grad(), autocast_off(like):
            solved, psi = [blocks[n] for n in differentiated], [psi[n] for n in differentiated]
            scores = _scores(collector, solved, psi, gamma, empirical, reducer)
            self._choose(solved, psi, gamma, scores, torch.isfinite(scores), reducer)

    def _refresh_ranks(
        self,
        collector: FactorCollector,
        collect: Callable[[], None],
        cold: bool,
        empirical: bool,
        overlap: Callable[[], None] | None,
        reducer: Reducer,
    ) -> None:
        """`refresh` of several ranks, which may have called different layers but sum in the same places: all blocks are solved
        for, and those that no rank has differentiated keep their pairs. The host does not ask which these are, so that CUDA
        graphs can hold what is between the sums."""
        collect()
        collector.join()
        blocks = find_blocks(self.net)
        if not blocks:
            raise InputError(_no_block(collector))
        starts = [self._start(block) for block in blocks]
        like = blocks[0].weight
        own = [block.name in collector.gamma and collector.gamma[block.name].positions > 0 for block in blocks]
        with torch.no_grad(), autocast_off(like):
            differentiated = reducer.sum([flags_to_tensor(own, upcast(like.detach()))])[0] > 0  # by any rank
            if not any(own) and not capturing() and not bool(differentiated.any()):
                raise InputError(_no_block(collector))
            for block in blocks:
                collector.include(block)
            psi_problem = [collector.psi[block.name].factor() for block in blocks], [start for start, _ in starts]
            gamma_problem = [collector.gamma[block.name].factor() for block in blocks], [start for _, start in starts]
            # at once: half as many sums
            psi, gamma = top_of_lists([psi_problem, gamma_problem], cold=cold, reducer=reducer)
            for n in (n for n, known in enumerate(own) if not known):
                old = self.pairs.get(blocks[n].name)
                kept = (old.psi, old.gamma) if old is not None and old.fits(blocks[n]) else map(_unknown, starts[n])
                psi[n], gamma[n] = (
                    _where(differentiated[n], *each) for each in zip((psi[n], gamma[n]), kept, strict=True)
                )
        if overlap is not None:
            overlap()
        with torch.no_grad(), autocast_off(like):
            scores = _scores(collector, blocks, psi, gamma, empirical, reducer)
            finite = torch.isfinite(scores)
            if not all(own):
                finite = finite & torch.cat([differentiated[n].expand(block.groups) for n, block in enumerate(blocks)])
            self._choose(blocks, psi, gamma, scores, finite, reducer)

    def _choose(
        self,
        blocks: list[Block],
        psi: list[Eigenpair],
        gamma: list[Eigenpair],
        scores: Tensor,
        finite: Tensor,
        reducer: Reducer,
    ) -> None:
        """The blocks' pairs, and the block with the largest score, which rank 0 chooses for all. Scores that overflow half
        precision are ignored: a block without a finite score keeps its group, and if no score is finite at all, the block
        stays."""
        scores = torch.where(finite, scores, -1.0)
        zero = torch.zeros((), dtype=torch.long, device=scores.device)
        groups, best = [zero] * len(blocks), scores
        if any(block.groups > 1 for block in blocks):
            sizes = [block.groups for block in blocks]
            tops = [part.max(0) for part in scores.split(sizes)]
            best = torch.stack([top.values for top in tops])
            for n, (block, top, each_finite) in enumerate(zip(blocks, tops, finite.split(sizes), strict=True)):
                old = self.pairs.get(block.name)
                last = old.group if old is not None and old.fits(block) else zero
                groups[n] = torch.where(each_finite.any(), top.indices, last)
        # the host knows the last block, a CUDA graph does not
        index = torch.where(finite.any(), best.argmax(), -1)
        if reducer.ranks > 1:
            (chosen,) = reducer.from_rank_zero([torch.stack([index, *groups])])
            index, *groups = chosen.unbind()
        solved = zip(blocks, psi, gamma, groups, strict=True)
        self.pairs = self.pairs | {b.name: KroneckerEigenpair(p, g, group) for b, p, g, group in solved}
        self.choice = BlockChoice.of(index, blocks, after=self.choice)

    def _start(self, block: Block) -> tuple[Tensor, Tensor]:
        """The last eigenvectors, or the same arbitrary ones for every run."""
        pair = self.pairs.get(block.name)
        if pair is not None and pair.fits(block):
            return pair.psi.vector, pair.gamma.vector
        like = upcast(block.weight.detach()[:0])
        shapes = (block.psi_shape, block.gamma_shape)
        psi, gamma = (arbitrary(length, like.dtype, like.device).expand(groups, length) for groups, length in shapes)
        return psi, gamma

    def sliced(self, slices: Mapping[str, Mapping[int, Tensor]]) -> dict[str, KroneckerEigenpair]:
        """The pairs once parameters keep these positions of their dimensions: v^Γ those of outputs, v^Ψ those of inputs."""
        pairs = dict(self.pairs)
        names = {id(p): name for name, p in self.net.named_parameters()}  # a shared one has one name
        for block in find_blocks(self.net):
            kept = slices.get(names[id(block.weight)], {})
            if block.name in pairs and kept:
                pairs[block.name] = pairs[block.name].sliced(block, kept.get(0), kept.get(1))
        return pairs

    def state_dict(self) -> dict[str, Any]:
        """Eigenpairs of the trained blocks and the name of the chosen one: tensors, strings and None alone."""
        present = {block.name: block for block in find_blocks(self.net)}
        pairs = {name: pair for name, pair in self.pairs.items() if name in present and pair.fits(present[name])}
        block = self.block()
        return {
            "pairs": {name: pair.state() for name, pair in pairs.items()},
            "block": None if block is None else block.name,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        blocks = {block.name: block for block in find_blocks(self.net)}
        pairs = {}
        for name, tensors in state["pairs"].items():
            if name not in blocks:
                raise InputError(f"state must have eigenpairs of this network's blocks, got one of {name!r}")
            block = blocks[name]
            pair = KroneckerEigenpair.of_state({key: value.to(block.weight.device) for key, value in tensors.items()})
            if not pair.fits(block):
                raise InputError(
                    f"state must have eigenvectors of shapes {block.psi_shape} and {block.gamma_shape} for layer {name!r}, got "
                    f"{tuple(pair.psi.vector.shape)} and {tuple(pair.gamma.vector.shape)}"
                )
            pairs[name] = pair
        if state["block"] is not None and state["block"] not in pairs:
            raise InputError(f"state must have an eigenpair of its block {state['block']!r}, got none")
        self.pairs = pairs
        self.choice = None if state["block"] is None else BlockChoice.known(blocks[state["block"]])


def _scores(
    collector: FactorCollector,
    blocks: list[Block],
    psi: list[Eigenpair],
    gamma: list[Eigenpair],
    empirical: bool,
    reducer: Reducer,
) -> Tensor:
    """What ranks the groups of all blocks, (groups of all,)."""
    if empirical:
        each = [collector.empirical(b, p.vector, g.vector) for b, p, g in zip(blocks, psi, gamma, strict=True)]
        return reducer.sum([torch.cat(each)])[0]
    return torch.cat([pair.value for pair in psi]) * torch.cat([pair.value for pair in gamma])


def _unknown(start: Tensor) -> Eigenpair:
    """A pair of which nothing is known but where the solver starts, (groups, length)."""
    return Eigenpair(start.new_zeros(len(start)), start, start.new_full((len(start),), torch.inf))


def _where(condition: Tensor, one: Eigenpair, other: Eigenpair) -> Eigenpair:
    return Eigenpair(
        torch.where(condition, one.value, other.value),
        torch.where(condition, one.vector, other.vector),
        torch.where(condition, one.residual, other.residual),
    )
