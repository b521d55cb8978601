"""The flatness penalty in a training loop: the loss C + μ·max(0, vᵀHv − B) and its gradient.

`hgnp.curvature.step` has the algorithm, stage by stage; `hgnp.reference` has it as the paper states it.
"""

import dataclasses
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from hgnp.curvature.autodiff.forward import Output, check_gradients
from hgnp.curvature.batch_checks import failure_explained
from hgnp.curvature.choices import (
    Bundle,
    Choices,
    Curvature,
    DirectionFrom,
    DirectionOver,
    FisherType,
    GammaFrom,
    KfacApprox,
    Ranking,
    Scaling,
)
from hgnp.curvature.losses import Loss
from hgnp.curvature.step import State, Step, make_step
from hgnp.curvature.validation import check_bound, check_mu, finite
from hgnp.errors import InputError, refuse_renamed
from hgnp.execution.eager import Eager
from hgnp.execution.process_group import ranks_of
from hgnp.reducer import average_statistics, broadcast_networks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Flatness:
    """Leaves the gradient of L = C + μ·max(0, q − B), q = vᵀHv, in `.grad`, in place of `loss.backward()`.

    C is the loss and H its Hessian. v is a direction of large curvature, held fixed while q is differentiated: the top
    eigenvector of the Kronecker-factored curvature Ψ ⊗ Γ (K-FAC) of the *block*, the Linear or convolution layer, with the
    largest eigenvalue λ. Ψ is the second moment of the layer's inputs, Γ that of the derivatives of C with respect to its
    outputs. The penalty μ·max(0, q − B) is *active* where q > B. docs/flatness.md has the definitions.

    >>> import torch, hgnp
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> flat = hgnp.Flatness(net, mu=1e-3, bound=0.5)
    >>> for inputs, target in [(torch.randn(16, 4), torch.arange(16) % 2)] * 3:
    ...     optimizer.zero_grad()
    ...     loss = flat.backward(inputs, target)  # or flat.loss(inputs, target).backward()
    ...     optimizer.step()
    >>> flat.block in ("0", "2"), flat.radius > 0
    (True, True)

    Args:
        net: the network; it is trained as usual, and hgnp.Neurons may prune it between steps.
        loss: any loss(output, target) that is a mean; for cross-entropy, MSE and BCE-with-logits q may come from
            Gauss–Newton, which is faster; for any other it comes from the full Hessian.
        mu: weight μ of the penalty; with 0 a step is a plain PyTorch step.
        bound: the bound B, the curvature that is not penalised; a negative one keeps the penalty active.
        output: picks the logits from what the network returns, e.g. ``lambda o: o.logits``.
        flatness: "default" or "paper", a bundle of the choices below; choices given by name replace the bundle's.
            "paper" is curvature="hessian", direction_from="this_batch" and kfac_approx="expand". Below, the first value is
            the default's.
        curvature: "ggn": q from Gauss–Newton. "hessian": from the full Hessian.
        scaling: "plain": v as it is. "scale_invariant": each filter's part times the filter's norm.
        direction_from: "last_batch": the v of the batch before, one pass. "this_batch": the v of this batch, two passes.
        kfac_approx: how the Kronecker factors Ψ and Γ treat the positions of a convolution's output. "reduce": combined
            before the outer product. "expand": one outer product per position.
        fisher_type: "empirical": Γ from the batch's labels. "mc": from labels drawn from the network's own output.
        ranking: the penalised block. "kfac": the one with the largest λ^Ψ·λ^Γ. "empirical": the one with the largest
            vᵀFv, where F is the block's own empirical Fisher matrix.
        gamma_from: "loss": Γ from the derivatives of C. "penalized_loss": from those of C + μ·max(0, q − B) along the v of the
            batch before.
        direction_over: "block": v is K-FAC's eigenvector of one layer. "network": the top eigenvector of the Gauss–Newton
            matrix of all trained parameters, by power iteration; each refresh is one product with it, from the last v.
        penalty_every: the penalty is part of every k-th step only, with the weight k·mu; the other steps are plain PyTorch
            steps. On average over steps the gradient is that of L, at a fraction of the cost.
        refresh_every: with direction_from "last_batch", the number of steps with the penalty between two refreshes of v. 1 by
            default; `hgnp.Recipe`'s default is 8. Each call of `backward` or `loss` is a step: with gradient accumulation they
            are micro-batches.
        skip_inactive: if the penalty is inactive in the first step along a new v, the steps until the next refresh are plain.
        group: the process group of data-parallel training, such as `torch.distributed.group.WORLD`: `net` is the plain module,
            which gets rank 0's weights, and `backward` leaves the gradient of the batches of all ranks in `.grad`
            (docs/distributed.md).
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
        flatness: Bundle = "default",
        curvature: Curvature | None = None,
        scaling: Scaling | None = None,
        direction_from: DirectionFrom | None = None,
        kfac_approx: KfacApprox | None = None,
        fisher_type: FisherType | None = None,
        ranking: Ranking | None = None,
        gamma_from: GammaFrom | None = None,
        direction_over: DirectionOver | None = None,
        penalty_every: int = 1,
        refresh_every: int = 1,
        skip_inactive: bool = False,
        group: "ProcessGroup | None" = None,
    ) -> None:
        self._step, self._state = make_step(
            net, loss=loss, mu=mu, bound=bound, output=output, flatness=flatness, curvature=curvature, scaling=scaling,
            direction_from=direction_from, kfac_approx=kfac_approx, fisher_type=fisher_type, ranking=ranking,
            gamma_from=gamma_from, direction_over=direction_over, penalty_every=penalty_every,
            refresh_every=refresh_every, skip_inactive=skip_inactive, reducer=ranks_of(group, net),
        )  # fmt: skip
        broadcast_networks(self._step.reducer, net)
        self._eager = Eager(self._step, self._state)

    def backward(self, inputs: Any, target: Any, *, scale: float | Tensor = 1.0) -> Tensor:
        """Adds scale·∇(C + μ·max(0, q − B)) to `.grad` and returns C, which is not scaled. With penalty_every=k it is
        scale·∇(C + k·μ·max(0, q − B)) in every k-th step, from the first on, and scale·∇C in the others.

        Args:
            inputs: what the network takes: a tensor, a tuple or list (positional) or a dictionary (keywords).
            target: what the loss takes beside the output.
            scale: a factor on the gradient, such as 1/steps for gradient accumulation, or a gradient scaler's scale.
        """
        _check_scale(scale)
        with self._explained(inputs, target):
            return self._eager.backward(inputs, target, scale=scale)

    def loss(self, inputs: Any, target: Any, *, scale: float | Tensor = 1.0) -> Tensor:
        """C + μ·max(0, q − B) of a training batch along the v of the batch before, for a trainer that calls `backward` itself.

        One forward pass. Every call is a step: where a refresh is due it solves for the next v, by a backward pass
        that computes no weight gradients. `scale` multiplies that pass alone, and is divided out again: under float16 pass the
        gradient scaler's scale, or small derivatives underflow. The returned loss is not scaled.

        Args:
            inputs: what the network takes: a tensor, a tuple or list (positional) or a dictionary (keywords).
            target: what the loss takes beside the output.
            scale: a factor on the backward pass of the refresh.
        """
        _check_scale(scale)
        with self._explained(inputs, target):
            return self._eager.loss(inputs, target, scale=scale)

    def _explained(self, inputs: Any, target: Any) -> AbstractContextManager[None]:
        step = self._step
        return failure_explained(step.net, step.loss, step.output, (inputs, target), "target", where="this batch")

    def average_statistics(self) -> None:
        """With a group: running statistics of norms, which each rank computes from its own samples, are averaged over the
        ranks. Every rank calls it, before validation and before the network is saved. `sensitivity` does so itself."""
        average_statistics(self._step.reducer, self.net)

    def objective(self, inputs: Any, target: Any) -> Tensor:
        """C + μ·max(0, q − B) of a batch along that batch's own v, to be differentiated, as scores see it.

        It has no side effects: v, buffers, gradients and random state stay as they are. With a group it is this rank's share;
        the shares add up to the whole.

        Args:
            inputs: what the network takes: a tensor, a tuple or list (positional) or a dictionary (keywords).
            target: what the loss takes beside the output.
        """
        check_gradients()
        state = dataclasses.replace(self._state)
        with self._explained(inputs, target):
            self._step.share(state, inputs, target)
            v = self._step.direction_of(state, inputs, target) if state.mu else None
            return self._step.objective(state, inputs, target, mu=state.mu, direction=v).value()

    @property
    def net(self) -> nn.Module:
        """The network."""
        return self._step.net

    @property
    def choices(self) -> Choices:
        """The choices by name, those of the bundle included."""
        return self._step.choices

    @property
    def mu(self) -> float:
        """Weight μ of the penalty."""
        return self._state.mu

    @mu.setter
    def mu(self, value: float) -> None:
        check_mu(value)
        self._state.mu = float(value)

    @property
    def bound(self) -> float:
        """The bound B."""
        return self._state.bound

    @bound.setter
    def bound(self, value: float) -> None:
        check_bound(value)
        self._state.bound = float(value)

    @property
    def radius(self) -> float:
        """λ of the eigenpair that the last step penalised; NaN before the first. Waits for the device."""
        statistics = self._state.statistics
        return math.nan if statistics is None else statistics.penalized.radius.item()

    @property
    def curvature(self) -> float:
        """q = vᵀHv of the last step. Waits for the device."""
        statistics = self._state.statistics
        return math.nan if statistics is None else statistics.q

    @property
    def residual(self) -> float:
        """‖(Ψ ⊗ Γ)v − λv‖/λ of that eigenpair; over the network ‖Fv − qv‖/q of the last product. Waits for the device."""
        statistics = self._state.statistics
        return math.nan if statistics is None else statistics.residual.item()

    @property
    def block(self) -> str | None:
        """Name of the layer that the last step penalised; "network" with direction_over="network"."""
        statistics = self._state.statistics
        return None if statistics is None else statistics.penalized.block.name

    @property
    def direction(self) -> dict[str, Tensor]:
        """v of the last step (V = diag(n)·v in the scale-invariant metric) by parameter name, as `named_parameters()` has it;
        zero elsewhere."""
        statistics = self._state.statistics
        if statistics is None:
            return {}
        names = {id(p): name for name, p in self.net.named_parameters()}  # a shared one has one name
        parameters = dict(self.net.named_parameters(remove_duplicate=False))
        penalized = statistics.penalized
        return {names.get(id(parameters.get(n)), n): v for n, v in zip(penalized.names, penalized.vectors, strict=True)}

    @property
    def routes(self) -> dict[str, str]:
        """What q is for each block, in the network's current mode: exact (Gauss–Newton and Hessian agree), or which of the two
        and why they differ."""
        return self._step.passes.routes

    def __repr__(self) -> str:
        schedule = {"penalty_every": 1, "refresh_every": 1, "skip_inactive": False}  # by default, and then left out
        changed = {name: now for name, default in schedule.items() if (now := getattr(self._step, name)) != default}
        options = ", ".join(f"{name}={value!r}" for name, value in (vars(self._step.choices) | changed).items())
        head = f"Flatness(mu={self.mu:g}, bound={self.bound:g}, {options})"
        return "\n".join([head, *(f"  {name}: {route}" for name, route in self.routes.items())])

    def state_dict(self) -> dict[str, Any]:
        """Eigenpairs, the chosen block, the generator of sampled labels, the age of v, steps since the penalty was due and
        whether steps skip it: tensors, strings, numbers and None."""
        return self._step.state_dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, for a network of the same shapes: the next step is the one that would have
        followed.

        Args:
            state: what `state_dict` of a `Flatness` with the same choices returned.
        """
        self._step.load_state_dict(self._state, state)


def _check_scale(scale: Any) -> None:
    one = scale.numel() == 1 if isinstance(scale, Tensor) else (finite(scale) and scale != 0) or scale == math.inf
    if not one:  # inf is allowed: a gradient scaler may have grown too far, and then skips the step
        given = f"a tensor of shape {tuple(scale.shape)}" if isinstance(scale, Tensor) else repr(scale)
        raise InputError(f"scale must be a number other than 0 or a tensor with one entry, got {given}")


def step_and_state(flatness: Flatness) -> tuple[Step, State]:
    """The step and the state of a `Flatness`, for scores."""
    return flatness._step, flatness._state


def flatness_of(step: Step, state: State) -> Flatness:
    """A `Flatness` that shares this step and state, for the callbacks of a run."""
    view = Flatness.__new__(Flatness)
    view._step, view._state, view._eager = step, state, Eager(step, state)
    return view
