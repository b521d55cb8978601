"""Algorithm 1: the loss with its flatness term, L = C + μ·max(0, vᵀHv − B), and its gradient.

v is the top eigenvector of the K-FAC block with the largest eigenvalue (equations 3 and 4), held fixed while q = vᵀHv
is differentiated. A step, with the default choices:

    forward with tangents along v     → C, q                    curvature.gauss_newton, curvature.hessian
    backward of C, activations only   → Γ, the next v           curvature.direction
    backward of C + μ·max(0, q − B)   → .grad

Where the hinge is known to be closed, one backward of C alone is left, which shows Γ on its way. On a GPU a step as it is does
not wait to know; one from CUDA graphs does, halfway.

In the paper's order, direction_from="this_batch", v must be known first:

    forward and backward of C         → .grad, Γ, v
    tangents along v                  → q                       curvature.tape
    backward of μ·max(0, q − B)       → added to .grad, if the hinge is open

Where hooks wait for gradients, C goes back with the term.
"""

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgnp.curvature.check import check_functions, check_gradients, finite, refuse_unseen
from hgnp.curvature.choices import choose
from hgnp.curvature.direction import Direction
from hgnp.curvature.forward import Forward, Output, samples_in
from hgnp.curvature.losses import Loss, loss_curvature
from hgnp.curvature.passes import First, Pass, Passes
from hgnp.curvature.random import undisturbed
from hgnp.curvature.rhythm import Kind, Rhythm
from hgnp.curvature.seen import Sight
from hgnp.messages import refuse_renamed
from hgnp.removal import Removal, listen


class Flatness(Sight):
    """Leaves the gradient of C + μ·max(0, vᵀHv − bound) in `.grad`, in place of `loss.backward()`.

    loss      any loss(output, target) that is a mean; cross-entropy, MSE and BCE-with-logits have the fast route
    mu        weight of the term; with 0 a step is a plain PyTorch step
    bound     B; a negative one keeps the hinge open
    output    picks the logits from what the network returns, e.g. ``lambda o: o.logits``
    flatness  "default" or "paper", a bundle of the choices below; choices given by name replace the bundle's

    curvature "ggn" or "hessian"; scaling "plain" or "scale_invariant"; direction_from "last_batch" or "this_batch";
    kfac_approx "reduce" or "expand"; fisher_type "empirical" or "mc" (labels drawn from the output); ranking "kfac" or
    "empirical"; gamma_from "loss" or "penalized_loss".

    refresh_every  with direction_from "last_batch", v is renewed in every so many steps and kept in between: cheaper, older
    skip_inactive  if the penalty is inactive in the first step along a new v, the steps until the next renewal are plain
    """

    @refuse_renamed
    def __init__(
        self,
        net: nn.Module,
        *,
        loss: Loss = F.cross_entropy,
        mu: float = 1e-3,
        bound: float = 0.5,
        output: Output | None = None,
        flatness: str = "default",
        curvature: str | None = None,
        scaling: str | None = None,
        direction_from: str | None = None,
        kfac_approx: str | None = None,
        fisher_type: str | None = None,
        ranking: str | None = None,
        gamma_from: str | None = None,
        refresh_every: int = 1,
        skip_inactive: bool = False,
    ) -> None:
        check_functions(loss=loss, output=output)
        if not (finite(mu) and mu >= 0):
            raise ValueError(f"mu: {mu!r} was given; a finite number of at least 0 would do")
        if not finite(bound):
            raise ValueError(f"bound: {bound!r} was given; any finite number would do")
        self.net, self.loss, self.mu, self.bound, self.output = net, loss, float(mu), float(bound), output
        curvature_of_loss = loss_curvature(loss)
        if curvature_of_loss is None:
            if curvature == "ggn" or fisher_type == "mc":
                raise ValueError("loss: only cross-entropy, MSE and BCE-with-logits (means) have a Gauss–Newton route "
                                 "and labels to sample; use curvature='hessian' and fisher_type='empirical'")  # fmt: skip
            curvature = "hessian"
        self.choices = choose(
            flatness, curvature=curvature, scaling=scaling, direction_from=direction_from, kfac_approx=kfac_approx,
            fisher_type=fisher_type, ranking=ranking, gamma_from=gamma_from,
        )  # fmt: skip
        self.lags = self.choices.direction_from == "last_batch"
        """Whether a step penalises along the v of the batch before."""
        self.in_two_passes = not self.lags
        """Whether C goes forward and back first, in the paper's order."""
        self.rhythm = Rhythm(refresh_every, skip_inactive, lags=self.lags)
        refuse_unseen(net, flatten=mu > 0)
        self.v = Direction(net, self.choices, curvature_of_loss)
        self.passes = Passes(net, loss, output, self.choices, curvature_of_loss)
        self.weight: Tensor | None = None
        """mu on the device, for a step that is captured once and run with several."""
        self.first: First | None = None
        self.found: Pass | None = None
        """Of the step that is under way: its first pass in the paper's order, and what was found along v."""
        listen(net, self.neurons_removed)

    def backward(self, inputs: Any, target: Any, *, scale: float | Tensor = 1.0) -> Tensor:
        """Adds scale·∇(C + μ·max(0, q − B)) to `.grad` and returns C, which is not scaled."""
        check_gradients()
        scale = scale.reshape(()) if isinstance(scale, Tensor) else scale
        if self.mu == 0:
            return self._plain(inputs, target, scale)
        self.prepare(inputs, target, scale=scale)
        kind = self.kind()
        loss = self.run(kind, inputs, target, scale=scale)
        self.done(kind)
        return loss

    def kind(self) -> Kind:
        """What the next step does."""
        return self.rhythm.next(self.bound)

    def run(self, kind: Kind, inputs: Any, target: Any, *, scale: float | Tensor = 1.0) -> Tensor:
        """A step of this kind."""
        if kind.term:
            return self.step(inputs, target, renew=kind.renew, scale=scale)
        return self._renew_at_rest(inputs, target, scale) if kind.renew else self._plain(inputs, target, scale)

    def done(self, kind: Kind) -> None:
        """After a step of this kind."""
        self.rhythm.done(kind, None if self.seen is None else self.seen.curvature)

    @property
    def rested(self) -> bool:
        """Whether the last step was a plain one, as the term rests."""
        return self.rhythm.rested

    def prepare(self, inputs: Any, target: Any, *, scale: float | Tensor = 1.0) -> None:
        """What comes before a step: finding v where it is not that of the batch before. In the paper's order C goes back on
        the way, and `first` is left for the step."""
        if not samples_in(inputs):
            raise ValueError("inputs: the batch has no sample; at least one would do")
        self.passes.trace(inputs)
        if self.in_two_passes:
            self.first = self.passes.first(self.v, inputs, target, scale)
        elif self.v.block() is None:
            self._look(self.v, inputs, target, scale)

    def measure(self, inputs: Any, target: Any) -> None:
        """q after the first pass; `found` is left for `penalise`."""
        self.ahead(inputs, target, renew=False)

    def penalise(self, inputs: Any, target: Any) -> None:
        """Adds the term's gradient to C's, after the first pass."""
        if self.found is None:
            self.measure(inputs, target)
        self._penalise(1.0)

    def finish(self) -> None:
        """Lets go of a step."""
        self.first = self.found = None

    def _penalise(self, scale: float | Tensor) -> None:
        assert self.found is not None
        kept = self.first is not None and self.first.kept
        self.passes.back(self._penalty(self.found.q) * scale, retain_graph=kept)

    @property
    def opened(self) -> bool:
        """Whether the hinge was open in the last step. Waits for the device."""
        return self.seen is not None and self.seen.q > self.bound

    def step(self, inputs: Any, target: Any, *, renew: bool, scale: float | Tensor = 1.0) -> Tensor:
        """The step itself, along the v that is known; in the paper's order what is left of it."""
        first = self.first
        try:
            loss = self.ahead(inputs, target, renew=renew)
            assert self.found is not None
            if first is None:
                self.go_back(inputs, target, opened=self.found.acts(self.bound), scale=scale)
            elif not first.went_back:
                self.passes.back((first.loss + self._penalty(self.found.q) if self.opened else first.loss) * scale)
            elif self.opened:
                self._penalise(scale)
            return loss
        finally:
            self.finish()

    def ahead(self, inputs: Any, target: Any, *, renew: bool) -> Tensor:
        """The forward pass of a step along the v that is known; `found` is left for the way back."""
        self.found = self.passes.along(self.v, inputs, target, renew=renew, first=self.first)
        self.seen = self.found.seen
        return self.found.loss.detach()

    def go_back(
        self, inputs: Any, target: Any, *, opened: bool, scale: float | Tensor = 1.0, retain_graph: bool = False
    ) -> None:
        """The gradient of C, and of the term unless the hinge is known to be closed."""
        found = self.found
        assert found is not None

        def backward() -> None:
            total = found.loss + self._penalty(found.q) if opened else found.loss
            self.passes.back(total * scale, retain_graph=retain_graph)

        if found.observer is None:
            backward()
            return
        found.observer.begin()
        if opened and self.choices.gamma_from == "loss":
            gather = partial(self.v.pull, found.observer, found.loss, found.z, target, scale)
            self.v.update(found.observer, gather, cold=False, meanwhile=backward)
        else:
            self.v.update_by(backward, found.observer, found.loss, found.z, target, scale)

    def _renew_at_rest(self, inputs: Any, target: Any, scale: float | Tensor) -> Tensor:
        """A plain step that shows the next v."""
        observer = self.v.observer(inputs)
        z = self.passes.run(inputs, Forward(watch=observer))
        loss = self.loss(z, target)
        self.v.update_by(lambda: self.passes.back(loss * scale), observer, loss, z, target, scale)
        return loss.detach()

    def _plain(self, inputs: Any, target: Any, scale: float | Tensor) -> Tensor:
        loss = self.loss(self.passes.run(inputs), target)
        self.passes.back(loss * scale)
        return loss.detach()

    def objective(
        self,
        inputs: Any,
        target: Any,
        *,
        mu: float | None = None,
        within: contextlib.AbstractContextManager[Any] | None = None,
        v: Direction | None = None,
    ) -> Tensor:
        """L = C + μ·max(0, q − B) of a batch, to be differentiated, along this batch's own v in the network's present mode.

        Leaves no trace: buffers, random streams and what is known of earlier batches stay as they are. `mu` may differ from
        the one that is trained with. `within` is entered around the forward that L is made of. `v` is what `look` has found,
        if it was asked before.
        """
        mu = self.mu if mu is None else mu
        v = self.look(inputs, target) if mu and v is None else v
        with undisturbed(*self.net.parameters()):
            if v is None:
                return self.loss(self.passes.run(inputs, within=within, traceless=True), target)
            found = self.passes.along(v, inputs, target, renew=False, traceless=True, within=within)
        return found.loss + mu * self._hinge(found.q)

    def look(self, inputs: Any, target: Any) -> Direction:
        """A batch's own v, as `objective` has it. Leaves no trace."""
        v = self.v.copy()
        self._look(v, inputs, target, 1.0, cold=True)
        return v

    def _look(self, v: Direction, inputs: Any, target: Any, scale: float | Tensor, *, cold: bool = False) -> None:
        """Updates v to this batch by a pass that leaves no trace; with `cold`, as exactly as from a cold start."""
        observer = v.observer(inputs)
        with undisturbed(*self.net.parameters()):  # dropout masks repeat from pass to pass
            z = self.passes.run(inputs, Forward(watch=observer), traceless=True)
            gather = partial(v.pull, observer, self.loss(z, target), z, target, scale)
            v.update(observer, gather, cold=cold or v.block() is None)

    def _penalty(self, q: Tensor) -> Tensor:
        return (self.mu if self.weight is None else self.weight) * self._hinge(q)

    def _hinge(self, q: Tensor) -> Tensor:
        return torch.where(q > self.bound, q - self.bound, 0.0)

    @property
    def routes(self) -> dict[str, str]:
        """What q is for each block, in the mode last seen: exact (Gauss–Newton and Hessian agree), or which of the two
        and what sets them apart."""
        return self.passes.routes

    def __repr__(self) -> str:
        choices = ", ".join(f"{name}={choice!r}" for name, choice in vars(self.choices).items())
        head = f"Flatness(mu={self.mu:g}, bound={self.bound:g}, {choices})"
        return "\n".join([head, *(f"  {name}: {route}" for name, route in self.routes.items())])

    def state_dict(self) -> dict[str, Any]:
        """Eigenpairs, the chosen block, the stream of sampled labels, the age of v and whether the term rests: tensors,
        strings, numbers and None."""
        return self.v.state_dict() | self.rhythm.state_dict(self.bound)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if missing := self.state_dict().keys() - (state if isinstance(state, Mapping) else {}):
            raise ValueError(f"state: it has no {', '.join(sorted(missing))}; what state_dict() has given would do")
        self.v.load_state_dict(state)
        self.rhythm.load_state_dict(state)

    def neurons_removed(self, removal: Removal) -> Callable[[], None]:
        """Slices every eigenvector with its layer. The work is done here; what is returned only assigns."""
        pairs = self.v.sliced(removal.slices)

        def commit() -> None:
            self.v.pairs = pairs
            self.seen = None
            self.rhythm.wake()
            self.passes.forget()

        return commit
