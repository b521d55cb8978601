"""The stages of a step from CUDA graphs.

What a step does depends on the host in two points, the block that is penalised and whether the penalty is active. For each
block that was chosen and each shape of a batch there is a graph of forward and decide, which gives q, and two of backward. In
the paper's order a step is three graphs: C forward and backward, which gives v; then, once the host knows the block, q along
it; then, if the penalty is active, the gradient of the term. A removal drops all graphs.

A graph computes what the stages compute, from the same parameters, buffers and eigenvectors in place. The optimizer's step
stays outside, so that any optimizer and schedule is possible; it has a graph of its own where it can (`optimizer`).

Ranks sum between graphs: n and w before a step, C and q after its forward pass, gradients at its end. Pieces that refresh v
have sums within, at which their capture is split (`graphs.between_graphs`). A capture itself sums nothing, and a step sums as
often as `Eager`'s, so that ranks may capture at different times, or not at all.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hgnp.curvature.autodiff.operations import tensors_in
from hgnp.curvature.autodiff.rng import RandomState
from hgnp.curvature.direction import BlockChoice
from hgnp.curvature.step import PLAIN, State, Step
from hgnp.curvature.validation import has_gradient_hooks, has_module_hooks
from hgnp.execution.captured import Captured, Versions, copied, copy_into, tensors_of
from hgnp.execution.eager import AutocastFactory, Eager
from hgnp.execution.graphs import Capture, CaptureError, copied_batch, fingerprint, refill, shape_key
from hgnp.execution.optimizer import Gradients, GraphedOptimizer
from hgnp.removal import Removal, listen

Piece = Callable[[Any, Any], Tensor | None]
R = TypeVar("R")


class Graphed:
    """Runs the stages of `step` over `state` from CUDA graphs, where they can be captured."""

    uses_graphs = True

    def __init__(self, step: Step, state: State, precision: AutocastFactory = contextlib.nullcontext) -> None:
        self.step, self.state, self.net, self._precision = step, state, step.net, precision
        self._eager = Eager(step, state)
        self.device = next(self.net.parameters()).device
        self.refused: str | None = None
        """Why steps run eagerly, if they do."""
        if step.choices.fisher_type == "mc":
            self.refused = "its labels are drawn"  # a graph would draw the same at every replay
        self._capture_at = Capture(self.device)
        self._optimizer = GraphedOptimizer(self._capture_at)
        dtype = torch.promote_types(torch.float32, next(self.net.parameters()).dtype)
        self._mu = torch.zeros((), dtype=dtype, device=self.device)
        self._known_mu: float | None = None
        self._weight = torch.zeros((), dtype=torch.double, device=self.device)
        """w, where graphs read it."""
        self._graphs: dict[Any, Captured] = {}
        self._warmed_up: set[Any] = set()
        self._static: dict[str, Any] = {}
        self._memory: list[Tensor] = []
        self._grads: dict[nn.Parameter, Tensor] = {}
        self._kept: dict[tuple[nn.Parameter, ...], Gradients] = {}
        self._graph_grads: Gradients | None = None
        """The gradients of the last step, if they came from graphs."""
        self._block: str | None = None
        """The block of the last step in the paper's order."""
        self._built: Any = None
        """Fingerprint of what graphs were captured from."""
        self.fetch: Callable[[], Any] | None = None
        """Fetches the next batch: called before the host waits for the device."""
        self._upcoming: tuple[Any, Any] = None, None
        """The prefetched batch and its shape key."""
        listen(self.net, self.neurons_removed)

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Around the steps of an epoch: all of them on one stream."""
        return self._capture_at.running()

    def backward(self, inputs: Any, target: Any, *, scale: float | Tensor = 1.0) -> Tensor:
        """As `Eager.backward`, but replaces `.grad` instead of adding to it."""
        batch, (upcoming, shape) = (inputs, target), self._upcoming
        self._upcoming = None, None
        if upcoming is None or upcoming[0] is not inputs or upcoming[1] is not target:
            shape = shape_key(batch, self.device)
        if self.refused is not None:
            self._forget()
        if self.refused is not None or shape is None or isinstance(scale, Tensor) or scale != 1:
            self._drop_grads()
            return self._run_eager(partial(self._eager.backward, scale=scale), batch)
        if self._is_first(shape):
            return self._first_of_shape(shape, batch)
        return self._step(shape, batch)

    def zero_grad(self) -> None:
        """Nothing: `backward` replaces gradients."""

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps on the gradients of the last `backward`."""
        self._optimizer.step(optimizer, self._graph_grads)

    def begin_epoch(self) -> None:
        """Network, gradients and optimizer may have changed since the last step."""
        self._graph_grads = None
        self._optimizer.forget()
        hooks, numbers = has_gradient_hooks(self.net), self.step.captured_numbers()
        built = fingerprint(self.net, self.step.loss), hooks, numbers, self.state.bound
        if self._built != built:
            self._restart()
            self._built = built

    def _step(self, shape: Any, batch: Any) -> Tensor:
        step, state = self.step, self.state
        plan = step.plan(state)
        step.share(state, *batch)
        if state.weight is not None:
            state.weight = self._weight.copy_(state.weight)
        shape = self._with_samples(shape)
        if self._known_mu != state.mu:
            self._known_mu = state.mu
            self._mu.fill_(state.mu)
        self._sync_eigenpairs()  # before a graph is looked up: a layer that no batch called before drops all graphs
        try:
            if plan == PLAIN:
                state.loss = self._run(("plain", shape), self._plain, batch)
                step.decide(state)
            elif not step.lagged:
                self._in_papers_order(shape, batch)
            else:
                key = plan, state.direction.name() if plan.penalty else None, shape
                known = key in self._graphs or ("forward", key) in self._graphs
                if not known and state.direction.block() is None:  # nothing is known of v yet
                    self._drop_grads()
                    return self._run_eager(self._eager.run_stages, batch)
                self._lagged(key, batch)
            self._sum_gradients()
            step.advance(state)
        finally:
            state.release()
        assert state.loss is not None
        return state.loss

    def _with_samples(self, shape: Any) -> Any:
        """What graphs of the current step depend on: with ranks, where v is refreshed, the samples of all of them too, a number
        by which factors are divided."""
        state = self.state
        return (shape, state.samples) if state.plan.refresh and state.weight is not None else shape

    def _sum_gradients(self) -> None:
        """Over the ranks, in the memory that graphs leave them in."""
        if self.step.reducer.ranks == 1:
            return
        summed = self.step.summed_gradients()
        if self._graph_grads is None or not self._grads:  # some piece ran eagerly, or graphs are gone since
            self._graph_grads = None
            for p, grad in summed:
                p.grad = grad
            return
        known = [(p, grad) for p, grad in summed if grad is not None]
        torch._foreach_copy_([self._grads[p] for p, _ in known], [grad for _, grad in known])
        self._attach_grads(self._gradients(tuple(p for p, _ in known)))

    # Pieces of a step: what one graph holds

    def _plain(self, inputs: Any, target: Any) -> Tensor | None:
        self.step.plain(self.state, inputs, target)
        self.state.release()
        return self.state.loss

    def _forward(self, inputs: Any, target: Any) -> Tensor | None:
        self.step.forward(self.state, inputs, target)
        return self.state.loss

    def _backward(self, active: bool, retain_graph: bool, inputs: Any, target: Any) -> None:
        self.step.backward(self.state, target, mu=self._mu, active=active, retain_graph=retain_graph)

    def _without_penalty(self, inputs: Any, target: Any) -> Tensor | None:
        self.step.forward(self.state, inputs, target)
        self.step.decide(self.state)
        self._backward(False, False, inputs, target)
        self.state.release()
        return self.state.loss

    def _loss(self, inputs: Any, target: Any) -> Tensor | None:
        """In the paper's order: C, its gradient, and v."""
        self.step.prepare(self.state, inputs, target)
        self.step.forward(self.state, inputs, target)
        self.step.backward_loss(self.state, target)
        assert self.state.current is not None
        return self.state.current.loss.detach()

    def _tangents(self, inputs: Any, target: Any) -> None:
        self.step.tangents(self.state, inputs, target)

    def _term(self, inputs: Any, target: Any) -> None:
        assert self.state.current is not None
        if self.state.current.q is None:
            self._tangents(inputs, target)
        self.step.backward_term(self.state, mu=self._mu, active=True)

    # A step, piece by piece

    def _lagged(self, key: Any, batch: Any) -> None:
        """Without a penalty a step is one piece. With one it is two: forward, and backward with the term or without once the
        host knows q."""
        if not self.state.plan.penalty:
            self.state.loss = self._run(key, self._without_penalty, batch)
            return
        if ("forward", key) not in self._graphs:
            self._drop_grads()
            batch = copied_batch(batch, self.net)
            if self.refused is not None or self._is_first(key) or not self._capture_all_three(key, batch):
                self._run_eager(self._uncaptured, batch)
                return
        forward = self._graphs["forward", key]
        self.state.loss = self._replay(forward, batch)
        self.step.decide(self.state)
        self._prefetch()
        self._replay(self._graphs["active" if self.state.active() else "inactive", key], forward.batch)

    def _uncaptured(self, inputs: Any, target: Any) -> None:
        """The same stages, not captured."""
        self.step.forward(self.state, inputs, target)
        self.step.decide(self.state)
        self._backward(self.state.active(), False, inputs, target)

    def _capture_all_three(self, key: Any, batch: Any) -> bool:
        """Captures the graphs of forward and of both backward passes, or none."""
        try:
            forward = self._capture(self._forward, batch, after=True)  # it leaves no gradients
            inactive = self._capture(partial(self._backward, False, True), batch)
            active = self._capture(partial(self._backward, True, False), batch)  # frees the autograd graph
        except CaptureError as error:
            self.state.release()  # the eager step may need the memory
            self._refuse(error)
            return False
        self._graphs |= {("forward", key): forward, ("active", key): active, ("inactive", key): inactive}
        return True

    def _in_papers_order(self, shape: Any, batch: Any) -> None:
        state = self.state
        loss = self._run(("loss", shape), self._loss, batch)
        captured = self._graphs.get(("loss", shape))
        if captured is not None:  # a replay does not run the stage's own code
            batch, state.loss_differentiated = captured.batch, True
        ahead = self._graphs.get(("q", self._block, shape))
        if ahead is not None:  # most often the block is the same again: q is under way while the host learns of it
            self._replay(ahead, batch)
            self._prefetch()
        block = state.direction.name()
        q, term = ("q", block, shape), ("term", block, shape)
        if ahead is None or block != self._block:
            self._run(q, self._tangents, batch, after=True)
        self._block, state.loss = block, loss
        self.step.decide(state)
        if state.active():
            decided = state.loss, state.statistics
            captured_now = term in self._warmed_up and term not in self._graphs
            if captured_now:  # it differentiates a q that was captured just before it
                self._graphs.pop(q, None)
                self._run(q, self._tangents, batch, after=True)
            self._run(term, self._term, batch, after=True)
            state.loss, state.statistics = decided  # q may have been computed again, as this rank has it

    def _prefetch(self) -> None:
        """Fetches the next batch before the host waits for the device."""
        upcoming = None if self.fetch is None else self.fetch()
        self._upcoming = upcoming, None if upcoming is None else shape_key(upcoming, self.device)

    def _is_first(self, key: Any) -> bool:
        """Whether this is the first time that `key` comes up; from now on it is not."""
        new = key not in self._warmed_up
        self._warmed_up.add(key)
        return new

    def _first_of_shape(self, shape: Any, batch: Any) -> Tensor:
        """An eager step, which shows whether steps can be captured: not if graphs cannot repeat its random numbers, or hooks
        are to be called."""
        step, state = self.step, self.state
        before = RandomState(*self.net.parameters())
        self._drop_grads()
        loss = self._run_eager(self._eager.backward, copied_batch(batch, self.net))
        plan, block = state.plan, None if state.statistics is None else state.statistics.penalized.block.name
        if not before.is_now() and not self._can_draw(before):
            self.refused = "its forward draws random numbers"
        elif has_gradient_hooks(self.net):
            self.refused = "hooks get its gradients"
        elif has_module_hooks(self.net):
            self.refused = "a replay calls no module hooks"
        elif plan == PLAIN:
            self._warmed_up.add(("plain", shape))
        elif step.lagged:
            self._warmed_up.add((plan, block if plan.penalty else None, self._with_samples(shape)))
        else:
            shape = self._with_samples(shape)
            self._warmed_up |= {("loss", shape), ("q", block, shape)} | (
                {("term", block, shape)} if state.active() else set()
            )
        return loss

    def _can_draw(self, before: RandomState) -> bool:
        """Whether graphs draw what an eager step draws: on the device, whose generator PyTorch registers with graphs, and in
        one pass, or as dropout masks that the passes after it share."""
        if not before.is_now_on_cpu() or not self.step.one_draw:
            return False
        return not self.state.mu or self.step.lagged or self.step.passes.can_replay_tape

    def _run(self, key: Any, piece: Piece, batch: Any, *, after: bool = False) -> Tensor | None:
        """A piece of a step: eagerly the first time, from its graph from then on. One `after` another reads the same batch and
        adds to the same gradients."""
        if key not in self._graphs:
            if not after:
                self._drop_grads()
                batch = copied_batch(batch, self.net)
            if self.refused is None and not self._is_first(key):
                try:
                    self._graphs[key] = self._capture(piece, batch, after=after)
                except CaptureError as error:
                    self._refuse(error)
            if key not in self._graphs:  # no longer within `except`: the error holds what its capture took
                return self._run_eager(piece, batch)
        return self._replay(self._graphs[key], batch)

    def _run_eager(self, piece: Callable[..., R], batch: Any) -> R:
        """Runs a piece eagerly. Only here is autocast entered, which takes time: a replay does not need it."""
        with self._precision():
            return piece(*batch)

    def _refuse(self, error: CaptureError) -> None:
        self.refused = str(error)
        self._forget()

    def _capture(self, piece: Piece, batch: Any, *, after: bool = False) -> Captured:
        state, parameters = self.state, list(self.net.parameters())
        held = [p.grad for p in parameters]
        self.net.zero_grad(set_to_none=True)
        put = torch._foreach_add_ if after else torch._foreach_copy_
        self._sync_eigenpairs()
        direction = state.direction
        before, under_way = (state.statistics, direction.choice, state.loss), state.current
        block = direction.block()
        direction.choice = known = None if block is None else BlockChoice.known(block)
        self._grads = self._grads or {p: torch.empty_like(p) for p in parameters}

        def work() -> Tensor | None:
            loss = self._run_eager(piece, batch)
            if direction.choice is not known:
                copy_into(self._memory, tensors_of(direction.pairs, self._static))
            fresh = [(self._grads[p], p.grad) for p in parameters if p.grad is not None]
            if fresh:  # all graphs leave their gradients in the same memory
                put([kept for kept, _ in fresh], [grad for _, grad in fresh])
            return loss

        try:
            graph, loss = self._capture_at.capture(work)
            grads = self._gradients(tuple(p for p in parameters if p.grad is not None))
            statistics = None if state.statistics is before[0] else state.statistics
            choice = None if direction.choice is known else direction.choice
            taped = (
                state.current
                if under_way is None and state.current is not None and state.current.in_cuda_graph
                else None
            )
            read = (*parameters, *self.net.buffers(), *tensors_in(batch))
            return Captured(graph, batch, loss, grads, after, statistics, choice, taped, Versions.of(read))
        except CaptureError:  # the eager step may need the memory
            state.current, state.collector, state.penalized = under_way, None, None
            raise
        finally:
            state.statistics, direction.choice, state.loss = before
            direction.pairs = self._static
            for parameter, grad in zip(parameters, held, strict=True):
                parameter.grad = grad

    def _replay(self, captured: Captured, batch: Any) -> Tensor | None:
        state = self.state
        self._sync_eigenpairs()
        if captured.batch is not batch:
            refill(captured.leaves, batch)
        captured.graph.replay()
        if not captured.after:
            self._attach_grads(captured.grads)
        if captured.taped is not None:
            state.current = captured.taped
            captured.versions.restore()  # the replay computed it with the parameters as they are
        if captured.choice is not None:
            state.direction.choice = BlockChoice.of(captured.choice.index.number, captured.choice.blocks)
        if captured.statistics is not None:
            state.statistics = captured.copy_statistics(send=self.step.reducer.ranks == 1)
        return None if captured.loss is None else captured.loss.clone()

    def _gradients(self, parameters: tuple[nn.Parameter, ...]) -> Gradients:
        """Where graphs leave the gradients of these, the same list for the same parameters."""
        return self._kept.setdefault(parameters, [(p, self._grads[p]) for p in parameters])

    def _attach_grads(self, grads: Gradients) -> None:
        if self._graph_grads is not grads or any(parameter.grad is not grad for parameter, grad in grads):
            self._drop_grads()
            self._graph_grads = grads
            for parameter, grad in grads:
                parameter.grad = grad

    def _drop_grads(self) -> None:
        self.net.zero_grad(set_to_none=True)
        self._graph_grads = None

    def _sync_eigenpairs(self) -> None:
        """The eigenpairs in the memory that graphs read and write."""
        direction = self.state.direction
        pairs = direction.pairs
        if pairs is not self._static:
            if pairs.keys() != self._static.keys():
                self._forget()
                self._static = {name: copied(pair) for name, pair in pairs.items()}
                self._memory = tensors_of(self._static, self._static)
            elif any(pairs[name] is not self._static[name] for name in pairs):
                copy_into(self._memory, tensors_of(pairs, self._static))
            direction.pairs = self._static

    def _forget(self) -> None:
        self._graphs.clear()
        self._static, self._memory, self._grads, self._kept = {}, [], {}, {}
        self._optimizer.forget()
        self._capture_at.forget()

    def neurons_removed(self, removal: Removal) -> Callable[[], None]:
        return self._restart

    def _restart(self) -> None:
        self._forget()
        self._warmed_up = set()
