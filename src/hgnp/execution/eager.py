"""The stages of a step, one after the other."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hgnp.curvature.autodiff.forward import autocast_off, check_gradients
from hgnp.curvature.step import PLAIN, Number, Plan, State, Step
from hgnp.errors import InputError

AutocastFactory = Callable[[], contextlib.AbstractContextManager[Any]]
"""Enters autocast, if steps run under it."""


class Eager:
    """Runs the stages of `step` over `state`, operation by operation."""

    uses_graphs = False

    def __init__(self, step: Step, state: State, precision: AutocastFactory = contextlib.nullcontext) -> None:
        self.step, self.state, self._precision = step, state, precision
        self.fetch: Callable[[], Any] | None = None
        """Fetches the next batch: called before the host waits for q."""

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Around the steps of an epoch: nothing to set up."""
        return contextlib.nullcontext()

    def begin_epoch(self) -> None:
        """Nothing: a step reads the network and the optimizer as they are."""

    def zero_grad(self) -> None:
        """Before `backward`, which adds to `.grad`."""
        self.step.net.zero_grad(set_to_none=True)  # also what the optimizer does not train, or it would add up

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def backward(self, inputs: Any, target: Any, *, scale: Number = 1.0) -> Tensor:
        """Adds scale·∇L to `.grad` and returns C, which is not scaled."""
        self._begin(inputs, target)
        return self.run_stages(inputs, target, scale=scale)

    def _begin(self, inputs: Any, target: Any) -> Plan:
        """The stages before the network runs."""
        plan = self.step.plan(self.state)
        check_gradients()
        self.step.share(self.state, inputs, target)
        return plan

    def run_stages(self, inputs: Any, target: Any, *, scale: Number = 1.0) -> Tensor:
        """`backward` after `plan` and `share`."""
        step, state = self.step, self.state
        plan = state.plan
        scale = _scalar(scale)
        try:
            with self._precision(), step.reduced_gradients():
                if plan == PLAIN:
                    step.plain(state, inputs, target, scale=scale)
                    step.decide(state)
                elif step.lagged:
                    step.prepare(state, inputs, target, scale=scale)
                    step.forward(state, inputs, target)  # C, and q along the v of the last batch
                    step.decide(state)
                    active = plan.penalty and self._wait_for_active()
                    step.backward_and_refresh(state, target, mu=step.penalty_weight(state), scale=scale, active=active)
                else:
                    step.prepare(state, inputs, target, scale=scale)
                    step.forward(state, inputs, target)  # C
                    step.backward_loss_and_refresh(state, target, scale=scale)  # v
                    step.tangents(state, inputs, target)  # q along that v
                    step.decide(state)
                    step.backward_penalty(
                        state, mu=step.penalty_weight(state), scale=scale, active=self._wait_for_active()
                    )
            step.advance(state)
        finally:
            state.release()
        assert state.loss is not None
        return state.loss

    def _wait_for_active(self) -> bool:
        """Whether the penalty is active. The next batch is fetched first, while the device computes q."""
        if self.fetch is not None:
            assert self.state.loss is not None
            with autocast_off(self.state.loss):  # the step's autocast is not the loader's
                self.fetch()
        return self.state.active()

    def loss(self, inputs: Any, target: Any, *, scale: Number = 1.0) -> Tensor:
        """L with lagged v, to be differentiated by the caller. A due refresh comes first: the caller's backward pass may be
        scaled, repeated or left out. `scale` keeps the refresh's own backward pass, for Γ, in a half-precision range."""
        step, state = self.step, self.state
        if not step.lagged:
            raise InputError(
                "direction_from must be 'last_batch' for loss(), got 'this_batch'; call backward(inputs, target)"
            )
        if step.reducer.ranks > 1:
            raise InputError(
                "group must be None for loss(), whose gradient the caller would have to sum over the ranks, got one of "
                f"{step.reducer.ranks} ranks; call backward(inputs, target)"
            )
        plan = self._begin(inputs, target)
        scale = _scalar(scale)
        try:
            if plan != PLAIN:
                step.prepare(state, inputs, target, scale=scale)
            step.forward(state, inputs, target)
            step.decide(state)
            active = plan.penalty and state.active()
            if plan.refresh:
                step.refresh(state, target, mu=step.penalty_weight(state), scale=scale, active=active)
            step.advance(state)
            return step.total(state, mu=step.penalty_weight(state), active=active)
        finally:
            state.release()


def _scalar(scale: Number) -> Number:
    """A scale of one element without dimensions, so that the scaled loss has none."""
    return scale.reshape(()) if isinstance(scale, Tensor) else scale
