"""The direction v, kept from batch to batch: every block's top eigenpair, and the block they point to.

v is the eigenvector of the block with the largest score, zero in all others (equation 4). A batch's factors are gathered by
an `observer` on the way through a forward pass; `update` solves for the eigenpairs from where the last batch left them, and
chooses. All that a step takes from a batch for v goes through `update`; all that the host decides about v is `block`.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hgnp.curvature.blocks import Block, find_blocks
from hgnp.curvature.branches import Branches
from hgnp.curvature.choices import Choices
from hgnp.curvature.eigen import Eigenpair, arbitrary, top_of_each
from hgnp.curvature.forward import autocast_off, samples_in
from hgnp.curvature.losses import LossCurvature
from hgnp.curvature.spectrum import Chosen, Observer, Pair, choose_block
from hgnp.curvature.wide import wide


class Direction:
    """v of the batches seen so far."""

    def __init__(self, net: nn.Module, choices: Choices, curvature: LossCurvature | None) -> None:
        self.net, self.choices = net, choices
        self._curvature = curvature
        self._scale_invariant = choices.scaling == "scale_invariant"
        self._empirical = choices.ranking == "empirical"
        self.pairs: dict[str, Pair] = {}
        """Block → its eigenpair."""
        self.chosen: Chosen | None = None
        self._generator: torch.Generator | None = None

    def copy(self) -> "Direction":
        """One to go on with from here while this one stays as it is."""
        other = copy.copy(self)
        other.pairs = dict(self.pairs)
        other._generator = None if self._generator is None else self._generator.clone_state()
        return other

    def known(self, block: Block, pair: Pair) -> "Direction":
        """One whose v is this pair of a block."""
        other = copy.copy(self)
        other.pairs, other.chosen = {block.name: pair}, Chosen.known(block)
        return other

    def name(self) -> str | None:
        """Of the block that was chosen. Waits for the last choice."""
        return None if self.chosen is None else self.chosen.block().name

    def block(self) -> Block | None:
        """The block that was chosen, unless it is gone, frozen or of another shape by now."""
        name = self.name()
        found = next((block for block in find_blocks(self.net) if block.name == name), None)
        return found if found is not None and self.pairs[found.name].fits(found) else None

    def seeds(self, block: Block) -> list[tuple[Tensor, Tensor]]:
        """The block's parameters with their parts of v."""
        return self.pairs[block.name].direction(block, scale_invariant=self._scale_invariant)

    def observer(self, inputs: Any) -> Observer:
        return Observer(
            find_blocks(self.net), samples_in(inputs), kfac_approx=self.choices.kfac_approx,
            scale_invariant=self._scale_invariant, keep=self._empirical,
        )  # fmt: skip

    def update(
        self,
        observer: Observer,
        gather: Callable[[], None],
        *,
        cold: bool,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """v of the batch that the observer has seen go forward. `gather` shows it the derivatives of C; `meanwhile` is work
        of the step that needs nothing of the new v, and runs beside the search for it where that can be."""
        if not observer.psi:
            raise ValueError("net: none of its Linear and convolution layers was called in a way that can be seen; "
                             "a scripted or compiled network must be given as the plain module")  # fmt: skip
        branches = Branches()
        blocks = [block for block in find_blocks(self.net) if block.name in observer.psi]
        starts = [self._start(block) for block in blocks]
        like = blocks[0].weight
        gamma: list[Eigenpair] = []
        known: list[int] = []
        with branches.branch(), torch.no_grad(), autocast_off(like):
            sides = [observer.psi[block.name].factor() for block in blocks]
            psi = top_of_each(sides, [start for start, _ in starts], cold=cold)

        def solve() -> None:
            known.extend(n for n, block in enumerate(blocks) if observer.gamma[block.name].positions)
            with torch.no_grad(), autocast_off(like):
                others = [observer.gamma[blocks[n].name].factor() for n in known]
                gamma.extend(top_of_each(others, [starts[n][1] for n in known], cold=cold))

        observer.when_gathered = solve  # while the backward pass still has something to do
        try:
            gather()
        finally:
            observer.when_gathered = None  # they would hold each other
        if not gamma:  # some layers got no derivative
            observer.join()
            with branches.branch():
                solve()
        if meanwhile is not None:
            meanwhile()
        observer.join()
        branches.join()
        with torch.no_grad(), autocast_off(like):
            pairs, self.chosen = choose_block(
                observer, [blocks[n] for n in known], [psi[n] for n in known], gamma, empirical=self._empirical
            )
        self.pairs = self.pairs | pairs

    def update_by(
        self,
        backward: Callable[[], None],
        observer: Observer,
        loss: Tensor,
        z: Any,
        target: Any,
        scale: float | Tensor,
        *,
        cold: bool = False,
    ) -> None:
        """`update` where a step's own backward pass is of scale·C alone (or of scale·L, if Γ is): it shows the derivatives on
        its way."""
        if self.choices.fisher_type == "mc":
            self.update(observer, partial(self.pull, observer, loss, z, target, scale), cold=cold, meanwhile=backward)
            return
        with observer.gathering(scale):
            self.update(observer, backward, cold=cold)

    def pull(self, observer: Observer, loss: Tensor, z: Any, target: Any, scale: float | Tensor) -> None:
        """A `gather` of its own: a backward pass for activations alone."""
        with autocast_off(loss):
            if self.choices.fisher_type == "mc":
                assert self._curvature is not None
                observer.pull(z, self._curvature.draw(z.detach(), target, self._draws(z.device)), scale)
            else:
                observer.pull(loss, None, scale)

    def _start(self, block: Block) -> tuple[Tensor, Tensor]:
        """The last eigenvectors, or the same arbitrary ones for every run."""
        pair = self.pairs.get(block.name)
        if pair is not None and pair.fits(block):
            return pair.psi.vector, pair.gamma.vector
        like = wide(block.weight.detach()[:0])
        shapes = (block.psi_shape, block.gamma_shape)
        psi, gamma = (arbitrary(side, like.dtype, like.device).expand(groups, side) for groups, side in shapes)
        return psi, gamma

    def _draws(self, device: torch.device) -> torch.Generator:
        """Sampled labels have a stream of their own, so that the training's is left alone."""
        if self._generator is None:
            self._generator = torch.Generator(device).manual_seed(0)
        return self._generator

    def sliced(self, slices: Mapping[str, Mapping[int, Tensor]]) -> dict[str, Pair]:
        """The pairs once parameters keep these positions of their dimensions: v^Γ goes as the weight's outputs, v^Ψ as its
        inputs, to unit length again."""
        pairs = dict(self.pairs)
        for block in find_blocks(self.net):
            kept = slices.get(f"{block.name}.weight".lstrip("."), {})
            if block.name in pairs and kept:
                pairs[block.name] = pairs[block.name].sliced(block, kept.get(0), kept.get(1))
        return pairs

    def state_dict(self) -> dict[str, Any]:
        """Eigenpairs, the chosen block and the stream of sampled labels: tensors, strings and None alone."""
        return {
            "pairs": {name: pair.state() for name, pair in self.pairs.items()},
            "block": None if self.chosen is None else self.chosen.block().name,
            "generator": None if self._generator is None else self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        blocks = {block.name: block for block in find_blocks(self.net)}
        pairs = {}
        for name, tensors in state["pairs"].items():
            if name not in blocks:
                raise ValueError(f"state: it has an eigenpair for {name!r}, which is no block of this network")
            block = blocks[name]
            pair = Pair.of_state({key: value.to(block.weight.device) for key, value in tensors.items()})
            if not pair.fits(block):
                raise ValueError(
                    f"state: layer {name!r} has factors of shapes {block.psi_shape} and {block.gamma_shape}, "
                    f"the state's are {tuple(pair.psi.vector.shape)} and {tuple(pair.gamma.vector.shape)}"
                )
            pairs[name] = pair
        if state["block"] is not None and state["block"] not in pairs:
            raise ValueError(f"state: its block is {state['block']!r}, for which it has no eigenpair")
        self.pairs = pairs
        self.chosen = None if state["block"] is None else Chosen.known(blocks[state["block"]])
        self._generator = None
        if state["generator"] is not None:
            self._draws(next(self.net.parameters()).device).set_state(state["generator"])
