"""Algorithm 1 as a program: the stages of a training step over one explicit state.

A step leaves the gradient of L = C + μ·max(0, q − B) in `.grad`. q = vᵀHv, and v is the top eigenvector of the K-FAC block with
the largest eigenvalue (equations 3 and 4), held fixed while q is differentiated. With direction_over="network" v is the top
eigenvector of the whole network's Gauss–Newton matrix instead: a refresh is then one product with it (`network_direction`).

    stage                      in → out                                                      what ranks sum
    plan                       schedule, first q along v → what this step does               –
    share                      target → n, w = own share of the loss's normaliser            normaliser, n of each rank
    prepare                    first batch → where Gauss–Newton holds, a first v             as refresh
    forward                    batch, lagged v → w·C, w·q, Ψ moments, live autograd pass     statistics of synchronised norms
    decide                     w·C, w·q → C, q of all ranks; q is sent to the host: the      C and q, detached, in one buffer
                               penalty is active if q > B
    backward_and_refresh       pass, active → .grad of w·(C + μ·q) or w·C; probes → Γ        the norms' adjoints
                               moments; beside it `refresh`, if the plan has one             as refresh
    refresh                    moments, old eigenpairs → eigenpairs, block                   the set of blocks; each product F·x
                                                                                             of all blocks in one buffer; the
                                                                                             block is rank 0's
    advance                    plan → age of v, when the penalty is due or skipped           –
    plain                      `forward` and `backward_and_refresh` of a plain PyTorch step  as these
    in the paper's order:
    backward_loss_and_refresh  `backward_and_refresh` of w·C alone                           as there
    tangents                   v of this very batch → w·q                                    statistics of synchronised norms
    backward_penalty           pass, active → .grad of μ·w·q                                 the norms' adjoints

`reduced_gradients`, around a step, sums what it adds to `.grad` over the ranks. How often ranks sum depends on the plan, the
layers and the options alone: one may run a step eagerly that another replays. The score stage is in `hgnp.scoring`: it runs
`direction_of` and `objective` under gates, and sums |δ| over samples and ranks before any division.

With lagged v (direction_from="last_batch"):

    plan, share, prepare, forward, decide, backward_and_refresh, advance

In the paper's order (direction_from="this_batch") v comes from the batch that is penalised:

    plan, share, prepare, forward, backward_loss_and_refresh, tangents, decide, backward_penalty, advance

With penalty_every=k the penalty is due in the first of every k steps, weighted by k·μ; the others are plain, and neither age v
nor refresh it.

A step with neither penalty nor refresh, and one of SAM (`hgnp.curvature.sam`):

    plan, share, plain, decide, advance

`refresh` is a stage by itself where no backward pass of C gives Γ: for `Flatness.loss`, whose caller runs the backward pass,
for hooks on parameters, which get the gradient once and whole, and for v over the network.

A boundary between stages is a data dependency, not a barrier. The stages say what is computed; `hgnp.execution` says how: one
after the other, or from CUDA graphs. Executors hold a `Step`, which holds options and cached properties of the network, and a
`State`, which every stage may write.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgnp.curvature.autodiff.forward import (
    CHECKPOINTED,
    CHECKPOINTED_NETWORK,
    Forward,
    Output,
    autocast_off,
    derivatives_explained,
    samples_in,
)
from hgnp.curvature.autodiff.passes import Pass, Passes
from hgnp.curvature.autodiff.rng import preserve_rng
from hgnp.curvature.choices import Choices, choose
from hgnp.curvature.collector import FactorCollector
from hgnp.curvature.device import HostScalar, flags_to_tensor
from hgnp.curvature.direction import BlockChoice, Direction
from hgnp.curvature.eigen import kronecker_residual
from hgnp.curvature.factors import Block, WholeNetwork, find_blocks
from hgnp.curvature.losses import Loss, RankRows, loss_curvature, target_normaliser, weighted
from hgnp.curvature.network_direction import COLD_PRODUCTS, AnyDirection, NetworkDirection
from hgnp.curvature.validation import (
    check_bound,
    check_functions,
    check_mu,
    check_network,
    check_schedule,
    has_gradient_hooks,
)
from hgnp.errors import InputError, refuse_renamed
from hgnp.reducer import LOCAL, Reducer
from hgnp.removal import Removal, listen

Number = float | Tensor
"""A number on the host, or on the device, where CUDA graphs read it. A `scale` is what the loss is multiplied by before a
backward pass, as by a GradScaler."""


@dataclass(frozen=True)
class Plan:
    """What a step does."""

    penalty: bool  # whether q is computed and penalised
    refresh: bool  # whether the next v is solved for


PLAIN = Plan(penalty=False, refresh=False)
"""A plain PyTorch step."""


@dataclass(frozen=True)
class PenalizedDirection:
    """v as a step penalises it: one block, or the network, and its eigenpair."""

    block: Block | WholeNetwork
    names: list[str]
    """Of the parameters that v has a part in: those of the block that were trained in this step."""
    vectors: list[Tensor]
    """v, in the shapes of these parameters."""
    radius: Tensor
    """λ of the eigenpair."""
    residuals: Tensor
    """Of v^Ψ and v^Γ."""


@dataclass(frozen=True)
class StepStatistics:
    """What a step penalised. Its numbers are still on the device."""

    penalized: PenalizedDirection
    curvature: Tensor
    """q, of all ranks from `decide` on; before it this rank's w·q."""
    sent: HostScalar | None = None
    """q on its way to the host, if it was sent there."""

    def sending(self) -> "StepStatistics":
        """The same, with q on its way."""
        return self if self.sent is not None else dataclasses.replace(self, sent=HostScalar.of(self.curvature))

    @property
    def q(self) -> float:
        """Waits for this one number."""
        return (self.sent or HostScalar.of(self.curvature)).item()

    @property
    def residual(self) -> Tensor:
        """‖(Ψ ⊗ Γ)v − λv‖/λ, computed on access."""
        return kronecker_residual(*self.penalized.residuals.unbind())


@dataclass(frozen=True)
class Objective:
    """w·L of a batch in its parts."""

    loss: Tensor
    """w·C"""
    penalty: Tensor | None = None
    """w·μ·(q − B); None where L is C alone."""
    active: Tensor | None = None
    """Whether q of all ranks is above B."""

    def value(self) -> Tensor:
        """w·L, to be differentiated. Waits for the device: an inactive penalty is left out; its derivative may be infinite."""
        return self.loss if self.penalty is None or not self.active else self.loss + self.penalty


@dataclass(eq=False)
class State:
    """What steps pass on to each other, and the intermediate results of the current step."""

    mu: float
    bound: float
    direction: AnyDirection
    generator: torch.Generator | None = None
    """Of sampled labels (fisher_type="mc"), so that the training's own random numbers are left alone."""
    since_penalty: int = 0
    """Steps since the last one that the penalty was due in; 0: it is due (`penalty_every`)."""
    age: int = 0
    """Steps since the last refresh, without those that the penalty is not due in."""
    skipping: bool = False
    """Whether the penalty was inactive along this v, so that steps are plain until the next refresh."""
    first_q: HostScalar | None = None
    """q of the first step along this v, on its way to the host."""

    plan: Plan = PLAIN
    """Of the current step, or the last one."""
    own_samples: int = 0
    """n of this rank's batch."""
    counts: Tensor | None = None
    """n of each rank's batch, on the device; None: there is one rank."""
    known_samples: int | None = None
    """n of all ranks, once the host knows it."""
    weight: Tensor | None = None
    """w, this rank's share of the loss; None: all of it."""
    current: Pass | None = None
    """The forward pass that is still to be differentiated."""
    collector: FactorCollector | None = None
    """Collects its Kronecker factors, where v is refreshed."""
    penalized: PenalizedDirection | None = None
    """The direction of its q."""
    loss_differentiated: bool = False
    """Whether C's gradient is in `.grad` already (paper's order)."""
    loss: Tensor | None = None
    """w·C, detached; from `decide` on that of all ranks."""
    statistics: StepStatistics | None = None
    """Of the last step that took q."""

    @property
    def samples(self) -> int:
        """n of all ranks, for which the host waits if there are several."""
        if self.known_samples is None:
            self.known_samples = self.own_samples if self.counts is None else int(self.counts.sum())
        return self.known_samples

    @property
    def most_samples(self) -> int:
        """n of the rank that has the largest batch."""
        return self.own_samples if self.counts is None else int(self.counts.max())

    def active(self) -> bool:
        """Whether the penalty is active. Waits for q."""
        return self.statistics is not None and self.statistics.q > self.bound

    def release(self) -> None:
        """Releases the step's autograd graph."""
        self.current, self.collector, self.penalized, self.loss_differentiated = None, None, None, False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around stages that a CUDA graph records. They compute nothing yet, so in the end C, statistics and v are as they
        were. The pass under way stays, as later graphs continue from it; if recording fails, it is restored, too. Inside, the
        block is one that the host knows: asking the device for it would end the capture."""
        direction, current = self.direction, self.current
        loss, statistics, pairs, choice = self.loss, self.statistics, direction.pairs, direction.choice
        block = direction.block()
        direction.choice = None if block is None else BlockChoice.known(block)
        try:
            yield
        except Exception:  # what runs instead may need the memory
            self.current, self.collector, self.penalized = current, None, None
            raise
        finally:
            self.loss, self.statistics, direction.pairs, direction.choice = loss, statistics, pairs, choice

    def neurons_removed(self, removal: Removal) -> Callable[[], None]:
        """Slices every eigenvector with its layer. The work is done here; what is returned only assigns."""
        pairs = self.direction.sliced(removal.slices)

        def commit() -> None:
            self.direction.pairs = pairs
            self.statistics = None
            self.skipping, self.first_q = False, None

        return commit


def check_differentiable(value: Tensor) -> None:
    """InputError unless `value`, a loss, can be differentiated."""
    if not value.requires_grad:
        raise InputError(
            "loss must be differentiable by the network's output, got a value without a gradient, such as of detach() or argmax"
        )


class Step:
    """The stages of Algorithm 1 for one network. What they write is in a `State`."""

    draws_once = True
    """Whether the first pass of a step alone draws random numbers, and the others share its masks. To draw the same again takes
    a restored generator, which a CUDA graph cannot have."""

    def __init__(
        self,
        net: nn.Module,
        *,
        loss: Loss = F.cross_entropy,
        output: Output | None = None,
        choices: Choices,
        penalty_every: int = 1,
        refresh_every: int = 1,
        skip_inactive: bool = False,
        reducer: Reducer = LOCAL,
    ) -> None:
        self.net, self.loss, self.output, self.choices, self.reducer = net, loss, output, choices, reducer
        self.lagged = choices.direction_from == "last_batch"
        """Whether a step penalises along the v of the batch before."""
        check_schedule(penalty_every, refresh_every, skip_inactive, lagged=self.lagged)
        self.penalty_every, self.refresh_every, self.skip_inactive = penalty_every, refresh_every, skip_inactive
        self._loss_curvature = loss_curvature(loss)
        self.passes = Passes(
            net, loss, output, gauss_newton=choices.curvature == "ggn",
            over_network=choices.direction_over == "network", reducer=reducer,
        )  # fmt: skip

    # Before a step

    def plan(self, state: State) -> Plan:
        """What the next step does. Waits for the first q along this v, if that is on its way."""
        if not state.mu or state.since_penalty:
            state.plan = PLAIN
            return PLAIN
        self._update_skipping(state)
        due = not self.lagged or state.age + 1 >= self.refresh_every
        state.plan = Plan(penalty=not state.skipping, refresh=due)
        return state.plan

    def penalty_weight(self, state: State) -> float:
        """μ of a step that has the penalty: times `penalty_every`, so that the mean over steps has μ."""
        return state.mu * self.penalty_every

    def share(self, state: State, inputs: Any, target: Any) -> None:
        """n and w of this rank's batch."""
        samples = samples_in(inputs)
        if not samples:
            raise InputError("inputs must hold at least one sample, got an empty batch")
        state.own_samples, state.counts, state.known_samples, state.weight = samples, None, None, None
        if self.reducer.ranks > 1:
            own = self.own_normaliser(inputs, target)
            numbers = torch.zeros(1 + self.reducer.ranks, dtype=torch.double, device=own.device)
            numbers[1 + self.reducer.rank].fill_(samples)  # kernels; the host would wait for a copy
            numbers[0] = own
            (total,) = self.reducer.sum([numbers])
            state.counts, state.weight = total[1:], numbers[0] / total[0]

    def own_normaliser(self, inputs: Any, target: Any) -> Tensor:
        """What the mean loss of this rank's batch has in its denominator; the number of samples for a loss that is not
        known."""
        known = target_normaliser(self.loss, target)
        device = next(self.net.parameters()).device
        return torch.full((), samples_in(inputs), dtype=torch.double, device=device) if known is None else known

    def prepare(self, state: State, inputs: Any, target: Any, *, scale: Number = 1.0) -> None:
        """Before the first step, and after the network has changed: where Gauss–Newton holds, and the first v, from
        this batch by a pass without side effects."""
        self.passes.inspect(inputs)
        if self.lagged and state.direction.block() is None:
            self._refresh_from_batch(state, state.direction, inputs, target, scale)

    def check_derivatives(self, state: State, inputs: Any, target: Any) -> None:
        """Before a run: that each step can differentiate its q, whichever block v lies in."""
        if state.mu:
            self.passes.check_derivatives(inputs, target)

    # The stages of a step

    def plain(self, state: State, inputs: Any, target: Any, *, scale: Number = 1.0) -> None:
        """A whole plain PyTorch step, forward and backward, except for `decide`: nothing depends on it."""
        self.forward(state, inputs, target)
        self.backward_and_refresh(state, target, mu=0.0, scale=scale)

    def forward(self, state: State, inputs: Any, target: Any) -> None:
        """C, and q along the lagged v if the plan has a penalty. In the paper's order C alone, recorded for `tangents`."""
        collects = state.plan.refresh and isinstance(state.direction, Direction)
        state.collector = self._collector(state, inputs) if collects else None
        if not self._takes_q(state):
            state.current = self.passes.primal(inputs, target, state.weight, state.collector)
        elif self.lagged:
            state.current, state.penalized = self._penalized_pass(
                state.direction, state, inputs, target, observer=state.collector
            )
        else:
            assert state.collector is not None
            state.current = self.passes.taped(inputs, target, state.weight, state.collector)
        check_differentiable(state.current.loss)
        self._record(state)

    def tangents(self, state: State, inputs: Any, target: Any) -> None:
        """q along the v of this batch, in the paper's order: the operations after the block run again, along v."""
        assert state.current is not None
        penalized_pass, state.penalized = self._penalized_pass(
            state.direction, state, inputs, target, primal=state.current
        )
        state.current = dataclasses.replace(state.current, q=penalized_pass.q)  # still the pass that its tape is of
        self._record(state)

    def decide(self, state: State) -> None:
        """C and q of all ranks. The penalty is active if q > B, which the host decides (`State.active`), so that q is sent
        there: to multiply an inactive penalty by zero on the device would turn a derivative of q that is not finite, 0·∞, into
        NaN gradients."""
        if self.reducer.ranks > 1:
            assert state.loss is not None
            own = [state.loss]
            if self._takes_q(state):
                assert state.statistics is not None
                own.append(state.statistics.curvature)
            state.loss, *q = self.reducer.sum([torch.stack([x.double() for x in own])])[0]
            if q:
                assert state.statistics is not None
                state.statistics = StepStatistics(state.statistics.penalized, q[0])
        if state.plan.penalty:
            assert state.statistics is not None
            state.statistics = state.statistics.sending()

    def backward_and_refresh(
        self,
        state: State,
        target: Any,
        *,
        mu: Number,
        scale: Number = 1.0,
        active: bool = False,
        retain_graph: bool = False,
    ) -> None:
        """The gradient of w·C, and of μ·w·q if the penalty is active; beside it the next v, if the plan has a refresh. Γ comes
        from this very backward pass if that is of the same loss. `retain_graph`: the same pass will be differentiated again."""
        collector, choices = state.collector, self.choices
        total = self.total(state, mu=mu, active=active)
        backward = partial(self._run_backward, total * scale, retain_graph=retain_graph)
        if collector is None:
            if state.plan.refresh:  # of v over the network: its product with F needs the pass, which `backward` frees
                self.refresh(state, target, scale=scale)
            backward()
            return
        current = state.current
        assert current is not None
        collector.restart()
        loss = self._gamma_loss(state, mu=mu, active=active)
        if choices.fisher_type == "mc" or (active and (loss is current.loss or self.penalty_every > 1)):
            collect = partial(self._collect_gamma, state, collector, loss, current.output, target, scale)
            self._solve(state, collect, overlap=backward)
        else:
            with collector.collecting(scale):
                self._solve(state, backward)
        if not retain_graph:
            collector.release()

    def backward_loss_and_refresh(self, state: State, target: Any, *, scale: Number = 1.0) -> None:
        """In the paper's order: the gradient of w·C and, beside it, v. Hooks on parameters get the gradient once and whole:
        where there are any, C waits for the penalty, and Γ takes a separate backward pass."""
        state.loss_differentiated = not has_gradient_hooks(self.net)
        if state.loss_differentiated:
            # `tangents` continues from this pass where it can, and the penalty is differentiated through it
            retain_graph = self.passes.can_replay_tape
            self.backward_and_refresh(state, target, mu=0.0, scale=scale, retain_graph=retain_graph)
        else:
            self.refresh(state, target, scale=scale)
        assert state.collector is not None
        state.collector.release()

    def backward_penalty(self, state: State, *, mu: Number, scale: Number = 1.0, active: bool) -> None:
        """In the paper's order: the gradient of μ·w·q if the penalty is active, and of w·C if it has waited."""
        assert state.current is not None
        if not state.loss_differentiated:
            self._run_backward(self.total(state, mu=mu, active=active) * scale)
        elif active:
            penalty = self._penalty(state, state.current.q, mu)
            if penalty.requires_grad:  # q may be constant: with MSE, where the last layer alone is trained
                self._run_backward(penalty * scale, retain_graph=state.current.in_cuda_graph)

    def total(self, state: State, *, mu: Number, active: bool) -> Tensor:
        """w·L: w·C, and w·μ·(q − B) if the penalty is active."""
        assert state.current is not None
        loss = state.current.loss
        return loss + self._penalty(state, state.current.q, mu) if active else loss

    def refresh(
        self, state: State, target: Any, *, mu: Number = 0.0, scale: Number = 1.0, active: bool = False
    ) -> None:
        """v of the pass that the collector observed, with Γ from a separate backward pass: of C, or of the penalised loss
        where `gamma_from` says so. Over the network, v ← Fv/‖Fv‖ from the pass along v."""
        if isinstance(state.direction, NetworkDirection):
            assert state.current is not None
            state.direction.iterate(state.current, self.reducer, scale)
            return
        collector, current = state.collector, state.current
        assert collector is not None
        assert current is not None
        loss = self._gamma_loss(state, mu=mu, active=active)
        self._solve(state, partial(self._collect_gamma, state, collector, loss, current.output, target, scale))
        collector.release()

    def advance(self, state: State) -> None:
        """After a step: how old v is, and whether steps along it are plain until the next refresh."""
        if not state.mu:
            return
        since, state.since_penalty = state.since_penalty, (state.since_penalty + 1) % self.penalty_every
        if since:  # a plain step: v is as it was
            return
        if state.plan.refresh:
            state.age, state.skipping = 0, False
            return
        if self.skip_inactive and state.age == 0:  # the first step along this v
            assert state.statistics is not None
            state.first_q = state.statistics.sent
        state.age += 1

    def reduced_gradients(self) -> AbstractContextManager[None]:
        """Around a step: what it adds to `.grad` is summed over the ranks, in one buffer."""
        return nullcontext() if self.reducer.ranks == 1 else self._reduced_gradients()

    @contextmanager
    def _reduced_gradients(self) -> Iterator[None]:
        parameters = [p for p in self.net.parameters() if p.requires_grad]
        before = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        try:
            yield
            for p, grad in self.summed_gradients():
                p.grad = grad
        finally:
            for p, earlier in zip(parameters, before, strict=True):
                if earlier is not None:
                    p.grad = earlier if p.grad is None else earlier.add_(p.grad)

    def summed_gradients(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        """The trained parameters, each with its `.grad` summed over the ranks, in one buffer; None where no rank has any."""
        parameters = [p for p in self.net.parameters() if p.requires_grad]
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        present = [p.grad is not None for p in parameters]
        *grads, ranks_with_grad = self.reducer.sum([*own, flags_to_tensor(present, own[0])])
        if not all(present):  # the host waits only where there may be parameters without a gradient on any rank
            present = ranks_with_grad.bool().tolist()
        return [(p, grad if there else None) for p, grad, there in zip(parameters, grads, present, strict=True)]

    # Scores

    def direction_of(self, state: State, inputs: Any, target: Any) -> AnyDirection:
        """A batch's own v, by as many products as without an earlier v. It has no side effects. `share` comes first."""
        assert state.own_samples, "share(state, inputs, target) must come before direction_of()"
        direction = state.direction.copy()
        state = dataclasses.replace(state, generator=None if state.generator is None else state.generator.clone_state())
        self._refresh_from_batch(state, direction, inputs, target, 1.0)
        return direction

    def objective(
        self,
        state: State,
        inputs: Any,
        target: Any,
        *,
        mu: float,
        direction: AnyDirection | None,
        within: AbstractContextManager[Any] | None = None,
    ) -> "Objective":
        """w·L of a batch, to be differentiated, along this v, in the network's current mode; None: C alone. `within` is entered
        around the forward pass. It has no side effects: buffers and random state stay as they are. `share` comes first."""
        assert state.own_samples, "share(state, inputs, target) must come before objective()"
        with preserve_rng(*self.net.parameters()):
            if direction is None:
                output = self.passes.run(inputs, self.norms_mode(), within=within, side_effect_free=True)
                return Objective(weighted(self.loss(output, target), state.weight))
            current, _ = self._penalized_pass(direction, state, inputs, target, side_effect_free=True, within=within)
        assert current.q is not None
        (q,) = self.reducer.sum([current.q.detach()])
        return Objective(current.loss, self._penalty(state, current.q, mu), q > state.bound)

    # What the stages are made of

    def _takes_q(self, state: State) -> bool:
        """Whether the step has a q: the refresh of v over the network takes one too."""
        return state.plan.penalty or (state.plan.refresh and isinstance(state.direction, NetworkDirection))

    def _record(self, state: State) -> None:
        """C and q of the current pass, as this rank has them."""
        current = state.current
        assert current is not None
        state.loss = current.loss.detach()
        if current.q is not None:
            assert state.penalized is not None
            state.statistics = StepStatistics(state.penalized, current.q.detach())

    def _penalized_pass(
        self, direction: AnyDirection, state: State, inputs: Any, target: Any, **how: Any
    ) -> tuple[Pass, PenalizedDirection]:
        """C and q along this v, and the block and eigenpair that it is. `how`: options of `Passes.with_curvature`."""
        block: Any = direction.block()
        assert block is not None
        pair: Any = direction.pairs[block.name]
        tangents = pair.tangents(block, scale_invariant=self.choices.scaling == "scale_invariant")
        current = self.passes.with_curvature(block, tangents, inputs, target, state.weight, **how)
        vectors = [part.detach() for _, part in tangents]
        radius = pair.value.clone()  # graphs write eigenpairs in place
        return current, PenalizedDirection(block, list(block.parameters), vectors, radius, pair.residuals)

    def _collector(self, state: State, inputs: Any) -> FactorCollector:
        return FactorCollector(
            find_blocks(self.net), samples_in(inputs), total_samples=state.samples, kfac_approx=self.choices.kfac_approx,
            scale_invariant=self.choices.scaling == "scale_invariant", keep_calls=self.choices.ranking == "empirical",
        )  # fmt: skip

    def _solve(self, state: State, collect: Callable[[], None], overlap: Callable[[], None] | None = None) -> None:
        """Eigenpairs and block of this batch from where the last one left them."""
        assert state.collector is not None
        assert isinstance(state.direction, Direction)
        first = not self.lagged and state.direction.block() is None  # a lagged v has its start from `prepare`
        state.direction.refresh(
            state.collector, collect, cold=first, overlap=overlap, empirical=self.choices.ranking == "empirical",
            reducer=self.reducer,
        )  # fmt: skip

    def _gamma_loss(self, state: State, *, mu: Number, active: bool) -> Tensor:
        """What Γ is of: w·C, or w·L, in which the penalty has μ itself. `mu` is that of the step, times `penalty_every`."""
        penalized = active and self.choices.gamma_from == "penalized_loss"
        return self.total(state, mu=mu / self.penalty_every if penalized else mu, active=penalized)

    def _collect_gamma(
        self, state: State, collector: FactorCollector, loss: Tensor, output: Tensor, target: Any, scale: Number
    ) -> None:
        """Γ by a separate backward pass, for activations alone: of the loss, or of labels drawn from the output."""
        with autocast_off(loss):
            if self.choices.fisher_type == "empirical":
                collector.collect(loss, None, scale)
                return
            assert self._loss_curvature is not None
            generator, rows = self._generator(state, output.device), self._rows(state, output)
            drawn = self._loss_curvature.draw(output.detach(), target, collector.samples, generator, rows)
            if state.weight is not None:  # normalised by the samples of all ranks
                drawn = drawn * (state.weight * collector.samples / collector.total_samples).sqrt()
            collector.collect(output, drawn, scale)

    def _rows(self, state: State, output: Tensor) -> RankRows | None:
        """This rank's rows of the joint batch's output: where they begin, and how many all ranks have."""
        if state.counts is None:
            return None
        counts = [round(n) for n in state.counts.tolist()]
        per_sample = output.shape[0] // state.own_samples
        return sum(counts[: self.reducer.rank]) * per_sample, sum(counts) * per_sample

    def _refresh_from_batch(
        self, state: State, direction: AnyDirection, inputs: Any, target: Any, scale: Number
    ) -> None:
        """Refreshes a direction from this batch alone, by passes without side effects. It starts from the direction's
        eigenpairs, where there are any, and takes as many products as without them: they may be of another batch."""
        if isinstance(direction, NetworkDirection):
            if direction.block() is None:
                start = NetworkDirection.arbitrary(self.net)
                direction.pairs, direction.choice = start.pairs, start.choice
            for _ in range(COLD_PRODUCTS):
                with preserve_rng(*self.net.parameters()):
                    current, _ = self._penalized_pass(direction, state, inputs, target, side_effect_free=True)
                direction.iterate(current, self.reducer, scale)
            return
        collector = self._collector(state, inputs)
        with preserve_rng(*self.net.parameters()):  # dropout masks repeat from pass to pass
            output = self.passes.run(inputs, Forward(observer=collector, reducer=self.reducer), side_effect_free=True)
            loss = weighted(self.loss(output, target), state.weight)
            check_differentiable(loss)
            direction.refresh(
                collector, partial(self._collect_gamma, state, collector, loss, output, target, scale),
                cold=True, empirical=self.choices.ranking == "empirical", reducer=self.reducer,
            )  # fmt: skip

    def norms_mode(self) -> Forward | None:
        """The mode of a plain pass: none, unless norms are synchronised."""
        return Forward(reducer=self.reducer) if self.reducer.sync_norms else None

    def _penalty(self, state: State, q: Tensor | None, mu: Number) -> Tensor:
        """w·μ·(q − B) from w·q, which an active penalty adds to the loss."""
        assert q is not None
        return mu * (q - (state.bound if state.weight is None else state.bound * state.weight.to(q.dtype)))

    def _update_skipping(self, state: State) -> None:
        """Whether steps skip the penalty, once the first q along this v has reached the host."""
        if state.first_q is not None:
            active = state.first_q.item() > state.bound
            state.skipping, state.first_q = not active, None

    def _run_backward(self, total: Tensor, *, retain_graph: bool = False) -> None:
        over_network = self.choices.direction_over == "network"
        with derivatives_explained(CHECKPOINTED_NETWORK if over_network else CHECKPOINTED), autocast_off(total):
            total.backward(retain_graph=retain_graph)

    def _generator(self, state: State, device: torch.device) -> torch.Generator:
        if state.generator is None:
            state.generator = torch.Generator(device).manual_seed(0)
        return state.generator

    def captured_numbers(self) -> dict[str, float]:
        """The step's own numbers that a CUDA graph holds as constants."""
        return {}

    # Checkpoints

    def state_dict(self, state: State) -> dict[str, Any]:
        """Eigenpairs, the chosen block, the generator of sampled labels, the age of v, steps since the penalty was due and
        whether steps skip it: tensors, strings, numbers and None."""
        self._update_skipping(state)
        generator = None if state.generator is None else state.generator.get_state()
        return state.direction.state_dict() | {
            "generator": generator,
            "since_penalty": state.since_penalty,
            "age": state.age,
            "skipping": state.skipping,
        }

    def load_state_dict(self, state: State, stored: Mapping[str, Any]) -> None:
        if missing := self.state_dict(state).keys() - (stored if isinstance(stored, Mapping) else {}):
            raise InputError(f"state must come from state_dict(), got one without {', '.join(sorted(missing))}")
        state.direction.load_state_dict(stored)
        state.since_penalty = stored["since_penalty"] % self.penalty_every
        state.age, state.skipping, state.first_q, state.generator = stored["age"], stored["skipping"], None, None
        state.statistics = None  # of a step before those that are restored
        if stored["generator"] is not None:
            generator = self._generator(state, next(self.net.parameters()).device)
            # a GPU's generator is of another kind than a CPU's
            if stored["generator"].shape == generator.get_state().shape:
                generator.set_state(stored["generator"].cpu())


@refuse_renamed
def make_step(
    net: nn.Module,
    *,
    loss: Loss = F.cross_entropy,
    mu: float = 1e-3,
    bound: float = 0.5,
    output: Output | None = None,
    flatness: str = "default",
    curvature: str | None = None,
    penalty_every: int = 1,
    refresh_every: int = 1,
    skip_inactive: bool = False,
    reducer: Reducer = LOCAL,
    **choices: str | None,
) -> tuple[Step, State]:
    """A step and the state it begins with, from the arguments of `Flatness`."""
    check_functions(loss=loss, output=output)
    check_mu(mu)
    check_bound(bound)
    if loss_curvature(loss) is None:
        if curvature == "ggn" or choices.get("fisher_type") == "mc":
            raise InputError(
                "loss must be the mean of cross-entropy, MSE or BCE-with-logits for curvature='ggn' and fisher_type='mc', got "
                f"{loss!r}; use curvature='hessian' and fisher_type='empirical'"
            )
        curvature = "hessian"
    chosen = choose(flatness, curvature=curvature, **choices)
    check_network(net, penalized=mu > 0)
    step = Step(
        net, loss=loss, output=output, choices=chosen, penalty_every=penalty_every, refresh_every=refresh_every,
        skip_inactive=skip_inactive, reducer=reducer,
    )  # fmt: skip
    direction = NetworkDirection(net) if chosen.direction_over == "network" else Direction(net)
    state = State(float(mu), float(bound), direction)
    listen(net, state.neurons_removed)
    return step, state
