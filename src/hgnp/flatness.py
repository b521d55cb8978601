"""Algorithm 1: the loss with its flatness term, L = C + μ·max(0, vᵀHv − B), and its gradient.

v is the top eigenvector of the K-FAC block with the largest eigenvalue (equations 3 and 4), held fixed while q = vᵀHv
is differentiated. A step, with the default choices:

    forward with tangents along v     → C, q                    curvature.tangent, curvature.losses
    backward of C, activations only   → Γ, the next v           curvature.spectrum
    backward of C + μ·max(0, q − B)   → .grad

The hinge is decided on the device; nothing in a step waits for it.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgnp.curvature import hessian
from hgnp.curvature.bends import Bends, Reasons
from hgnp.curvature.blocks import Block, find_blocks
from hgnp.curvature.check import check_tangent, refuse_unseen, refuse_untracked, tracked
from hgnp.curvature.choices import choose
from hgnp.curvature.eigen import arbitrary
from hgnp.curvature.factors import wide
from hgnp.curvature.forward import Forward, UnfitError, layer_of, run
from hgnp.curvature.losses import Loss, loss_curvature
from hgnp.curvature.operations import tensors_in
from hgnp.curvature.random import RandomState
from hgnp.curvature.spectrum import Chosen, Observer, Pair, solve
from hgnp.curvature.tangent import Tangent
from hgnp.removal import Removal, listen


@dataclass(frozen=True)
class Seen:
    """What a step penalised; its numbers are still on the device."""

    block: Block
    direction: list[Tensor]
    radius: Tensor
    residual: Tensor
    curvature: Tensor


class Flatness:
    """Leaves the gradient of C + μ·max(0, vᵀHv − bound) in `.grad`, in place of `loss.backward()`.

    loss      any loss(output, target) that is a mean; cross-entropy, MSE and BCE-with-logits have the fast route
    mu        weight of the term; with 0 a step is a plain PyTorch step
    bound     B; a negative one keeps the hinge open
    output    picks the logits from what the network returns, e.g. ``lambda o: o.logits``
    flatness  "default" or "paper", a bundle of the choices below; choices given by name replace the bundle's

    curvature "ggn" or "hessian"; norm "batch" or "frozen"; scaling "plain" or "scale_invariant"; v_from "last_batch" or
    "this_batch"; convention "reduce" or "expand"; labels "batch" or "sampled"; ranking "kfac" or "empirical".
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        loss: Loss = F.cross_entropy,
        mu: float = 1e-3,
        bound: float = 0.5,
        output: Callable[[Any], Any] | None = None,
        flatness: str = "default",
        curvature: str | None = None,
        norm: str | None = None,
        scaling: str | None = None,
        v_from: str | None = None,
        convention: str | None = None,
        labels: str | None = None,
        ranking: str | None = None,
    ) -> None:
        if not (math.isfinite(mu) and mu >= 0):
            raise ValueError(f"mu: {mu!r} was given; a finite number of at least 0 would do")
        if not math.isfinite(bound):
            raise ValueError(f"bound: {bound!r} was given; any finite number would do")
        self.net, self.loss, self.mu, self.bound, self.output = net, loss, float(mu), float(bound), output
        self._loss_curvature = loss_curvature(loss)
        if self._loss_curvature is None:
            if curvature == "ggn" or labels == "sampled":
                raise ValueError("loss: only cross-entropy, MSE and BCE-with-logits (means) have a Gauss–Newton route "
                                 "and labels to sample; use curvature='hessian' and labels='batch'")  # fmt: skip
            curvature = "hessian"
        self.choices = choose(
            flatness, curvature=curvature, norm=norm, scaling=scaling, v_from=v_from, convention=convention,
            labels=labels, ranking=ranking,
        )  # fmt: skip
        refuse_unseen(net)
        self._frozen = self.choices.norm == "frozen"
        if self._frozen:
            refuse_untracked(net)
        self._pairs: dict[str, Pair] = {}
        self._chosen: Chosen | None = None
        self._seen: Seen | None = None
        self._bends: dict[bool, Reasons] = {}
        self._checked: set[tuple[str, bool]] = set()
        self._generator: torch.Generator | None = None
        listen(net, self.neurons_removed)

    def backward(self, inputs: Any, target: Any, *, scale: float | Tensor = 1.0) -> Tensor:
        """Adds scale·∇(C + μ·max(0, q − B)) to `.grad` and returns C, which is not scaled."""
        if self.mu == 0:
            loss = self.loss(self._run(inputs), target)
            self._autograd(loss * scale)
            return loss.detach()
        if self.net.training not in self._bends:
            self._bends[self.net.training] = self._trace(inputs)
        if self._penalised_block() is None or self.choices.v_from == "this_batch":
            self._look(inputs, target, scale)
        if self._frozen and any(layer.training for layer in tracked(self.net)):
            return self._apart(inputs, target, scale)
        loss, q = self._penalised(inputs, target, scale)
        self._autograd((loss + self.mu * self._hinge(q)) * scale)
        return loss.detach()

    def _apart(self, inputs: Any, target: Any, scale: float | Tensor) -> Tensor:
        """C and q are of two functions: two passes, with the same dropout masks and one update of the buffers."""
        with RandomState(*self.net.parameters()):
            _, q = self._penalised(inputs, target, scale, traceless=True)
            self._autograd(self.mu * self._hinge(q) * scale)
        loss = self.loss(self._run(inputs), target)
        self._autograd(loss * scale)
        return loss.detach()

    def objective(
        self,
        inputs: Any,
        target: Any,
        *,
        mu: float | None = None,
        within: contextlib.AbstractContextManager[Any] | None = None,
    ) -> Tensor:
        """L = C + μ·max(0, q − B) of a batch, to be differentiated, along this batch's own v in the network's present mode
        (with norm="frozen" both C and q are of the evaluation-mode function of norms).

        Leaves no trace: buffers, random streams and what is known of earlier batches stay as they are. `mu` may differ from
        the one that is trained with. `within` is entered around the forward that L is made of.
        """
        within = within or contextlib.nullcontext()
        mu = self.mu if mu is None else mu
        if mu == 0:
            with RandomState(*self.net.parameters()):
                return self.loss(self._run(inputs, within=within, traceless=True), target)
        before = self._pairs, self._chosen, self._seen, self._generator
        try:
            self._generator = None if self._generator is None else self._generator.clone_state()
            self._pairs = dict(self._pairs)
            self._look(inputs, target, 1.0, cold=True)
            block = self._penalised_block()
            assert block is not None
            with RandomState(*self.net.parameters()):
                loss, q, _ = self._along(block, inputs, target, traceless=True, within=within)
            return loss + mu * self._hinge(q)
        finally:
            self._pairs, self._chosen, self._seen, self._generator = before

    def _penalised(
        self, inputs: Any, target: Any, scale: float | Tensor, *, traceless: bool = False
    ) -> tuple[Tensor, Tensor]:
        """C and q of one pass along the v known so far; the next v is solved for on the way."""
        block = self._penalised_block()
        assert block is not None
        observer = self._observer(inputs) if self.choices.v_from == "last_batch" else None
        loss, q, z = self._along(block, inputs, target, observer=observer, traceless=traceless)
        if observer is not None:
            self._solve(observer, loss, z, target, scale, cold=False)
        return loss, q

    def _along(
        self,
        block: Block,
        inputs: Any,
        target: Any,
        *,
        observer: Observer | None = None,
        traceless: bool,
        within: contextlib.AbstractContextManager[Any] | None = None,
    ) -> tuple[Tensor, Tensor, Any]:
        """C, q along the block's v, and the output."""
        pair = self._pairs[block.name]
        seeds = pair.direction(block, scale_invariant=self.choices.scaling == "scale_invariant")
        if self.choices.curvature == "ggn":
            mode = Tangent(seeds, watch=observer, frozen=self._frozen)
            z = self._run(inputs, mode, traceless=traceless, within=within)
            loss = self.loss(z, target)
            q = self._gauss_newton(z, mode.tangent(z), target, block, seeds)
        else:
            primitive = hessian.Primitive(watch=observer, frozen=self._frozen)
            z = self._run(inputs, primitive, traceless=traceless, within=within)
            loss = self.loss(z, target)
            with _autocast_off(loss):
                q = hessian.quotient(loss, seeds)
        parts = [direction.detach() for _, direction in seeds]
        self._seen = Seen(block, parts, pair.value, pair.residual, q.detach())
        return loss, q, z

    def _gauss_newton(
        self, z: Tensor, u: Tensor | None, target: Any, block: Block, seeds: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        assert self._loss_curvature is not None
        u = torch.zeros_like(z) if u is None else u
        with _autocast_off(z):
            if (block.name, self.net.training) not in self._checked:
                check_tangent(block, z, u, seeds)
                self._checked.add((block.name, self.net.training))
            return self._loss_curvature.quotient(z, u, target)

    def _hinge(self, q: Tensor) -> Tensor:
        return torch.where(q > self.bound, q - self.bound, 0.0)

    def _look(self, inputs: Any, target: Any, scale: float | Tensor, *, cold: bool = False) -> None:
        """v of this batch from a pass that leaves no trace; with `cold`, as exactly as from a cold start."""
        observer = self._observer(inputs)
        with RandomState(*self.net.parameters()):
            z = self._run(inputs, Forward(watch=observer, frozen=self._frozen), traceless=True)
            self._solve(observer, self.loss(z, target), z, target, scale, cold=cold or self._penalised_block() is None)

    def _solve(
        self, observer: Observer, loss: Tensor, z: Any, target: Any, scale: float | Tensor, *, cold: bool
    ) -> None:
        if not observer.psi:
            raise ValueError("net: none of its Linear and convolution layers was called in a way that can be seen; "
                             "a scripted or compiled network must be given as the plain module")  # fmt: skip
        with _autocast_off(loss):
            if self.choices.labels == "sampled":
                assert self._loss_curvature is not None
                cotangent = self._loss_curvature.draw(z.detach(), target, self._draws(z.device))
                observer.pull(z, cotangent, scale)
            else:
                observer.pull(loss, None, scale)
            with torch.no_grad():
                blocks = find_blocks(self.net)
                start = {block.name: self._start(block) for block in blocks}
                empirical = self.choices.ranking == "empirical"
                pairs, self._chosen = solve(observer, blocks, start, empirical=empirical, cold=cold)
                self._pairs |= pairs

    def _run(
        self,
        inputs: Any,
        mode: Forward | None = None,
        *,
        traceless: bool = False,
        within: contextlib.AbstractContextManager[Any] | None = None,
    ) -> Any:
        """The network's output; a traceless run works on copies of the buffers."""
        buffers = {name: buffer.clone() for name, buffer in self.net.named_buffers()} if traceless else None
        try:
            with mode or contextlib.nullcontext(), within or contextlib.nullcontext():
                return run(self.net, inputs, output=self.output, buffers=buffers)
        except UnfitError as error:
            raise ValueError(f"layer {layer_of(self.net, error)!r}: {error}") from error

    def _observer(self, inputs: Any) -> Observer:
        samples = next(tensors_in(inputs)).shape[0]
        return Observer(
            find_blocks(self.net), samples, convention=self.choices.convention,
            scale_invariant=self.choices.scaling == "scale_invariant", keep=self.choices.ranking == "empirical",
        )  # fmt: skip

    def _trace(self, inputs: Any) -> Reasons:
        mode = Bends(find_blocks(self.net), frozen=self._frozen)
        with RandomState(*self.net.parameters()):
            return mode.reasons(self._run(inputs, mode, traceless=True))

    def _autograd(self, total: Tensor) -> None:
        try:
            with _autocast_off(total):
                total.backward()
        except RuntimeError as error:
            if "is not implemented" in str(error):
                raise ValueError(
                    f"net: PyTorch has no further derivative of one of its operations ({error})"
                ) from error
            raise

    def _penalised_block(self) -> Block | None:
        """The block that was chosen, unless it is gone, frozen or of another shape by now."""
        name = None if self._chosen is None else self._chosen.block().name
        found = next((block for block in find_blocks(self.net) if block.name == name), None)
        return found if found is not None and self._pairs[found.name].fits(found) else None

    def _start(self, block: Block) -> tuple[Tensor, Tensor]:
        """The last eigenvectors, or the same arbitrary ones for every run."""
        pair = self._pairs.get(block.name)
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

    @property
    def seen(self) -> Seen | None:
        """All that is known of the last step, without waiting for the device."""
        return self._seen

    @property
    def radius(self) -> float:
        """λ of the pair that the last step penalised; not a number before the first."""
        return self._number("radius")

    @property
    def curvature(self) -> float:
        """q = vᵀHv of the last step."""
        return self._number("curvature")

    @property
    def residual(self) -> float:
        """‖(Ψ ⊗ Γ)v − λv‖/λ of that pair."""
        return self._number("residual")

    def _number(self, name: str) -> float:
        return math.nan if self._seen is None else getattr(self._seen, name).item()

    @property
    def block(self) -> str | None:
        """Name of the layer that the last step penalised."""
        return None if self._seen is None else self._seen.block.name

    @property
    def direction(self) -> dict[str, Tensor]:
        """v of the last step (V = diag(n)·v in the scale-invariant metric) by parameter name; zero elsewhere."""
        if self._seen is None:
            return {}
        names = [f"{self._seen.block.name}.{kind}".lstrip(".") for kind in ("weight", "bias")]
        return dict(zip(names, self._seen.direction, strict=False))

    @property
    def routes(self) -> dict[str, str]:
        """What q is for each block, in the mode last seen: exact (Gauss–Newton and Hessian agree), or which of the two
        and what sets them apart."""
        reasons = self._bends.get(self.net.training, {})
        term = {"ggn": "ggn, differs from the Hessian by", "hessian": "hessian, differs from Gauss–Newton by"}
        return {
            name: "exact" if why is None else f"{term[self.choices.curvature]}: {why}"
            for name, why in sorted(reasons.items())
        }

    def __repr__(self) -> str:
        c = self.choices
        head = (
            f"Flatness(mu={self.mu:g}, bound={self.bound:g}, curvature={c.curvature!r}, norm={c.norm!r}, "
            f"scaling={c.scaling!r}, v_from={c.v_from!r}, convention={c.convention!r}, labels={c.labels!r}, "
            f"ranking={c.ranking!r})"
        )
        return "\n".join([head, *(f"  {name}: {route}" for name, route in self.routes.items())])

    def state_dict(self) -> dict[str, Any]:
        """Eigenpairs, the chosen block and the stream of sampled labels: tensors, strings and None alone."""
        return {
            "pairs": {name: pair.state() for name, pair in self._pairs.items()},
            "block": None if self._chosen is None else self._chosen.block().name,
            "generator": None if self._generator is None else self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
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
        self._pairs = pairs
        self._chosen = None if state["block"] is None else Chosen.known(blocks[state["block"]])
        self._generator = None
        if state["generator"] is not None:
            self._draws(next(self.net.parameters()).device).set_state(state["generator"])

    def neurons_removed(self, removal: Removal) -> Callable[[], None]:
        """Slices every eigenvector with its layer: v^Γ as the weight's outputs, v^Ψ as its inputs, to unit length
        again. The work is done here; what is returned only assigns."""
        pairs = dict(self._pairs)
        for block in find_blocks(self.net):
            kept = removal.slices.get(f"{block.name}.weight".lstrip("."), {})
            if block.name in pairs and kept:
                pairs[block.name] = pairs[block.name].sliced(block, kept.get(0), kept.get(1))

        def commit() -> None:
            self._pairs = pairs
            self._seen = None
            self._checked = set()
            self._bends = {}

        return commit


def _autocast_off(like: Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(like.device.type, enabled=False)
