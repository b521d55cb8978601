"""An optimizer's step from a CUDA graph, where that is the same step.

A fused step is a kernel or two, but it takes the host longer to gather what they work on than it takes them to run, and where a
step waits for the device (the paper's order) the device then waits for the host. The graph has all numbers of the optimizer but
its learning rates, which it reads from the device.
"""

import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from hgnp.execution.graphs import CaptureContext, CaptureError, GraphSequence

Gradients = list[tuple[nn.Parameter, Tensor]]
"""Parameters, and the memory that graphs leave their gradients in."""


class GraphedOptimizer:
    def __init__(self, capture: CaptureContext) -> None:
        self._capture = capture
        self.forget()

    def forget(self) -> None:
        """Parameters, gradients or the optimizer's tensors may lie elsewhere from now on."""
        self._graph: GraphSequence | None = None
        self._captured_for: tuple[Any, ...] | None = None
        """What the graph is of: an optimizer, the gradients, its groups."""
        self._rates: list[Tensor] = []
        self._known: list[float] = []
        self._capturable: bool | None = None

    def step(self, optimizer: torch.optim.Optimizer, graph_grads: Gradients | None) -> None:
        """As `optimizer.step()`. `graph_grads`: the gradients that all come from graphs, if they do."""
        self._capturable = _is_capturable(optimizer) if self._capturable is None else self._capturable
        if graph_grads is None or not self._capturable:
            optimizer.step()
            return
        if self._captured_for is None or not self._is_of(optimizer, graph_grads):
            groups = [group | {"params": list(group["params"])} for group in optimizer.param_groups]
            self._graph, self._captured_for = None, (optimizer, graph_grads, groups)
            optimizer.step()  # its own tensors are made in the first
            return
        if self._graph is None:
            try:
                self._graph = self._captured(optimizer)
            except CaptureError:
                self._capturable = False
                optimizer.step()
                return
        for number, (rate, group) in enumerate(zip(self._rates, optimizer.param_groups, strict=True)):
            if self._known[number] != group["lr"]:
                self._known[number] = group["lr"]
                rate.fill_(group["lr"])
        self._graph.replay()

    def _is_of(self, optimizer: torch.optim.Optimizer, graph_grads: Gradients) -> bool:
        """Whether nothing but learning rates has changed."""
        assert self._captured_for is not None
        known, known_grads, groups = self._captured_for
        if known is not optimizer or known_grads is not graph_grads or len(groups) != len(optimizer.param_groups):
            return False
        return all(map(_differ_in_rate_alone, groups, optimizer.param_groups))

    def _captured(self, optimizer: torch.optim.Optimizer) -> GraphSequence:
        groups = optimizer.param_groups
        self._known = [group["lr"] for group in groups]
        self._rates = [torch.tensor(rate, dtype=torch.float32, device=self._capture.device) for rate in self._known]
        try:
            for group, rate in zip(groups, self._rates, strict=True):
                group["lr"] = rate
            return self._capture.capture(optimizer.step)[0]
        finally:
            for group, known in zip(groups, self._known, strict=True):
                group["lr"] = known


def _differ_in_rate_alone(group: dict[str, Any], other: dict[str, Any]) -> bool:
    if group.keys() != other.keys() or len(group["params"]) != len(other["params"]):
        return False
    same_parameters = all(map(operator.is_, group["params"], other["params"]))
    return same_parameters and all(group[name] == other[name] for name in group if name not in ("params", "lr"))


def _is_capturable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is PyTorch's own fused SGD, without hooks and not patched. A learning rate on the device is a float32."""
    step = vars(optimizer).get("step")  # a scheduler's wrapper, or one of the user's, which may be around that
    patched = step is not None and not (
        hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is torch.optim.SGD.step
    )
    hooks = (
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )  # fmt: skip
    if type(optimizer) is not torch.optim.SGD or patched or any(hooks):
        return False
    return all(
        group["fused"]
        and not isinstance(group["lr"], Tensor)
        and all(parameter.dtype != torch.float64 for parameter in group["params"])
        for group in optimizer.param_groups
    )
