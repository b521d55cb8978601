"""The stages of a step, one after the other."""

from typing import Any

from torch import Tensor

from hgnp.curvature.autodiff.forward import check_gradients
from hgnp.curvature.step import PLAIN, Scale, State, Step
from hgnp.errors import InputError


class Eager:
    """Runs the stages of `step` over `state`, operation by operation."""

    def __init__(self, step: Step, state: State) -> None:
        self.step, self.state = step, state

    def backward(self, inputs: Any, target: Any, *, scale: Scale = 1.0) -> Tensor:
        """Adds scale·∇L to `.grad` and returns C, which is not scaled."""
        step, state = self.step, self.state
        scale = scale.reshape(()) if isinstance(scale, Tensor) else scale
        plan = step.plan(state)
        check_gradients()
        step.share(state, inputs, target)
        try:
            with step.reduced_gradients():
                if plan == PLAIN:
                    step.plain(state, inputs, target, scale=scale)
                elif step.lagged:
                    step.prepare(state, inputs, target, scale=scale)
                    step.forward(state, plan, inputs, target)  # C, and q along the v of the last batch
                    step.decide(state)
                    active = plan.penalty and may_be_active(state)
                    step.backward(state, target, mu=state.mu, scale=scale, active=active)  # beside refresh
                else:
                    step.prepare(state, inputs, target, scale=scale)
                    step.forward(state, plan, inputs, target)  # C
                    step.backward_loss(state, target, scale=scale)  # beside refresh, which finds v
                    step.tangents(state, inputs, target)  # q along that v
                    step.decide(state)
                    step.backward_term(state, mu=state.mu, scale=scale, active=state.active())
            step.advance(state, plan)
        finally:
            state.release()
        assert state.loss is not None
        return state.loss

    def loss(self, inputs: Any, target: Any) -> Tensor:
        """L with lagged v, to be differentiated by the caller. A due refresh comes first: the caller's backward pass may be
        scaled, repeated or left out."""
        check_gradients()
        step, state = self.step, self.state
        if not step.lagged:
            raise InputError(
                "loss needs direction_from='last_batch', got 'this_batch', which differentiates C before q is known; "
                "call backward(inputs, target) instead"
            )
        plan = step.plan(state)
        step.share(state, inputs, target)
        try:
            if plan != PLAIN:
                step.prepare(state, inputs, target)
            step.forward(state, plan, inputs, target)
            step.decide(state)
            active = plan.penalty and may_be_active(state)
            if plan.refresh:
                step.refresh(state, target, mu=state.mu, active=active)
            step.advance(state, plan)
            return step.total(state, mu=state.mu, active=active)
        finally:
            state.release()


def may_be_active(state: State) -> bool:
    """Whether q has to be differentiated: not if the penalty is known to be inactive. On a GPU the host does not wait for q."""
    assert state.statistics is not None
    return state.statistics.curvature.device.type != "cpu" or state.active()
