"""The stages of a step from CUDA graphs.

What a step does depends on the host in two points, the block that is penalised and whether the penalty is active. For each
block that was chosen and each shape of a batch there is a graph of forward and decide, which shows q, and two of backward. In
the paper's order a step is three graphs: C forward and back, which shows v; then, once the host knows the block, q along it;
then, if it knows the penalty to be active, the gradient of the term. A removal drops all graphs.

What a graph computes is what the stages compute, from the same parameters, buffers and eigenvectors in place. The optimizer's
step stays outside, so that any optimizer and schedule will do; it has a graph of its own where it can (`optimizer`).
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hgnp.curvature.autodiff.operations import tensors_in
from hgnp.curvature.autodiff.rng import RandomState
from hgnp.curvature.direction import BlockChoice, KroneckerEigenpair
from hgnp.curvature.step import PLAIN, Plan, State, Step
from hgnp.curvature.validation import hooked
from hgnp.execution.captured import Captured, Versions, copied, copy_into, tensors_of
from hgnp.execution.eager import Eager
from hgnp.execution.graphs import Capture, RefusedError, built_of, kind_of, laid_out, refill
from hgnp.execution.optimizer import Gradients, GraphedOptimizer
from hgnp.removal import Removal, listen

Piece = Callable[[Any, Any], Tensor | None]
Precision = Callable[[], contextlib.AbstractContextManager[Any]]
R = TypeVar("R")


class Graphed:
    """Runs the stages of `step` over `state` from CUDA graphs, where they can be captured."""

    def __init__(self, step: Step, state: State, precision: Precision = contextlib.nullcontext) -> None:
        self.step, self.state, self.net, self._precision = step, state, step.net, precision
        self._eager = Eager(step, state)
        self.device = next(self.net.parameters()).device
        self.refused: str | None = None
        """Why steps are not captured, if they are not."""
        if step.choices.fisher_type == "mc":
            self.refused = "its labels are drawn"  # a graph would draw the same again and again
        elif step.reducer.ranks > 1:
            self.refused = "ranks sum within a step"
        self._capture_at = Capture(self.device)
        self._optimizer = GraphedOptimizer(self._capture_at)
        self._mu = torch.zeros((), device=self.device)
        self._known_mu: float | None = None
        self._graphs: dict[Any, Captured] = {}
        self._met: set[Any] = set()
        self._static: dict[str, KroneckerEigenpair] = {}
        self._memory: list[Tensor] = []
        self._grads: dict[nn.Parameter, Tensor] = {}
        self._kept: dict[tuple[nn.Parameter, ...], Gradients] = {}
        self._left: Gradients | None = None
        """The gradients of the last step, if they came from graphs."""
        self._block: str | None = None
        """The block of the last step in the paper's order."""
        self._built: Any = None
        """What graphs were captured from."""
        self.fetch: Callable[[], Any] | None = None
        """Fetches the next batch, which steps from graphs do before they wait for the device."""
        self._upcoming: tuple[Any, Any] = None, None
        """That batch and its kind, if they are known."""
        listen(self.net, self.neurons_removed)

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Around the steps of an epoch: all of them on one stream."""
        return self._capture_at.running()

    def backward(self, inputs: Any, target: Any, *, scale: float | Tensor = 1.0) -> Tensor:
        """As `Eager.backward`, in place of the gradients that are there."""
        batch, (upcoming, kind) = (inputs, target), self._upcoming
        self._upcoming = None, None
        if upcoming is None or upcoming[0] is not inputs or upcoming[1] is not target:
            kind = kind_of(batch, self.device)
        if self.refused is not None:
            self._forget()
        if self.refused is not None or kind is None or isinstance(scale, Tensor) or scale != 1:
            self._clear()
            return self._now(partial(self._eager.backward, scale=scale), batch)
        if self._first(kind):
            return self._first_of_kind(kind, batch)
        return self._step(kind, batch)

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """On the gradients that `backward` left."""
        self._optimizer.step(optimizer, self._left)

    def begin_epoch(self) -> None:
        """Whatever was done to network, gradients and optimizer since the last step is seen."""
        self._left = None
        self._optimizer.forget()
        numbers = {name: value for name, value in vars(self.step).items() if isinstance(value, float)}
        built = built_of(self.net, self.step.loss), hooked(self.net), numbers, self.state.bound
        if self._built != built:
            self._start_anew()
            self._built = built

    def _step(self, kind: Any, batch: Any) -> Tensor:
        step, state = self.step, self.state
        plan = step.plan(state)
        step.share(state, *batch)
        if self._known_mu != state.mu:
            self._known_mu = state.mu
            self._mu.fill_(state.mu)
        self._settle()  # before a graph is looked up: layers that only some batches meet make all graphs anew
        try:
            if plan == PLAIN:
                loss = self._run(("plain", kind), self._plain, batch)
                step.advance(state, plan)
            else:
                loss = self._lagged(plan, kind, batch) if step.lagged else self._in_papers_order(plan, kind, batch)
        finally:
            state.release()
        assert loss is not None
        return loss

    # Pieces of a step: what one graph holds

    def _plain(self, inputs: Any, target: Any) -> Tensor | None:
        self.step.plain(self.state, inputs, target)
        self.state.release()
        return self.state.loss

    def _forward(self, plan: Plan, inputs: Any, target: Any) -> Tensor | None:
        self.step.forward(self.state, plan, inputs, target)
        self.step.decide(self.state)
        return self.state.loss

    def _backward(self, active: bool, retain_graph: bool, inputs: Any, target: Any) -> None:
        self.step.backward(self.state, target, mu=self._mu, active=active, retain_graph=retain_graph)

    def _without_penalty(self, plan: Plan, inputs: Any, target: Any) -> Tensor | None:
        self._forward(plan, inputs, target)
        self._backward(False, False, inputs, target)
        self.state.release()
        return self.state.loss

    def _loss(self, plan: Plan, inputs: Any, target: Any) -> Tensor | None:
        """In the paper's order: C, forward and back, and v."""
        self.step.prepare(self.state, inputs, target)
        self.step.forward(self.state, plan, inputs, target)
        self.step.backward_loss(self.state, target)
        assert self.state.current is not None
        return self.state.current.loss.detach()

    def _tangents(self, inputs: Any, target: Any) -> None:
        self.step.tangents(self.state, inputs, target)
        self.step.decide(self.state)

    def _term(self, inputs: Any, target: Any) -> None:
        assert self.state.current is not None
        if self.state.current.q is None:
            self._tangents(inputs, target)
        self.step.backward_term(self.state, mu=self._mu, active=True)

    # A step, piece by piece

    def _lagged(self, plan: Plan, kind: Any, batch: Any) -> Tensor | None:
        direction = self.state.direction
        key = plan, direction.name() if plan.penalty else None, kind
        if not {key, ("forward", key)} & self._graphs.keys() and direction.block() is None:  # nothing is known of v yet
            self._clear()
            return self._now(self._eager.backward, batch)
        if plan.penalty:
            loss: Tensor | None = self._fork(plan, key, batch)
        else:
            loss = self._run(key, partial(self._without_penalty, plan), batch)
        self.step.advance(self.state, plan)
        return loss

    def _fork(self, plan: Plan, key: Any, batch: Any) -> Tensor | None:
        """A step in two graphs: forward, and backward with the term or without once the host knows q."""
        if ("forward", key) not in self._graphs:
            self._clear()
            batch = laid_out(batch, self.net)
            if self.refused is not None or self._first(key) or not self._forked(plan, key, batch):
                return self._now(partial(self._as_it_is, plan), batch)
        forward = self._graphs["forward", key]
        loss = self._replay(forward, batch)
        self._look_ahead()
        self._replay(self._graphs["active" if self.state.active() else "inactive", key], forward.batch)
        return loss

    def _as_it_is(self, plan: Plan, inputs: Any, target: Any) -> Tensor | None:
        """The same stages, not captured. The penalty is decided on the device."""
        loss = self._forward(plan, inputs, target)
        self._backward(True, False, inputs, target)
        return loss

    def _forked(self, plan: Plan, key: Any, batch: Any) -> bool:
        """Captures all three graphs, or none."""
        try:
            forward = self._capture(partial(self._forward, plan), batch, after=True)  # it leaves no gradients
            inactive = self._capture(partial(self._backward, False, True), batch)
            active = self._capture(partial(self._backward, True, False), batch)  # lets the pass go on its way
        except RefusedError as error:
            self.state.release()  # the step as it is may need the memory
            self._refuse(error)
            return False
        self._graphs |= {("forward", key): forward, ("active", key): active, ("inactive", key): inactive}
        return True

    def _in_papers_order(self, plan: Plan, kind: Any, batch: Any) -> Tensor:
        state = self.state
        loss = self._run(("loss", kind), partial(self._loss, plan), batch)
        assert loss is not None
        state.went_back = True
        look = self._graphs.get(("loss", kind))
        batch = batch if look is None else look.batch
        ahead = self._graphs.get(("q", self._block, kind))
        if ahead is not None:  # most often the block is the same again: q is under way while the host learns of it
            self._replay(ahead, batch)
            self._look_ahead()
        block = state.direction.name()
        q, term = ("q", block, kind), ("term", block, kind)
        if ahead is None or block != self._block:
            self._run(q, self._tangents, batch, after=True)
        self._block = block
        if state.active():
            captured_now = term in self._met and term not in self._graphs
            if captured_now:  # it goes back through a q that was captured just before it
                self._graphs.pop(q, None)
                self._run(q, self._tangents, batch, after=True)
            self._run(term, self._term, batch, after=True)
        self.step.advance(state, plan)
        return loss

    def _look_ahead(self) -> None:
        """What can be done before the host waits for the device."""
        upcoming = None if self.fetch is None else self.fetch()
        self._upcoming = upcoming, None if upcoming is None else kind_of(upcoming, self.device)

    def _first(self, key: Any) -> bool:
        """Whether there has been no step of this kind yet."""
        new = key not in self._met
        self._met.add(key)
        return new

    def _first_of_kind(self, kind: Any, batch: Any) -> Tensor:
        """Not captured, as what draws random numbers in ways that graphs cannot repeat never will be."""
        step, state = self.step, self.state
        before = RandomState(*self.net.parameters())
        self._clear()
        loss = self._now(self._eager.backward, laid_out(batch, self.net))
        plan, block = state.plan, None if state.statistics is None else state.statistics.along.block.name
        if not before.is_now() and not self._can_draw(before):
            self.refused = "its forward draws random numbers"
        elif hooked(self.net):
            self.refused = "hooks see its gradients"
        elif plan == PLAIN:
            self._met.add(("plain", kind))
        elif step.lagged:
            self._met.add((plan, block if plan.penalty else None, kind))
        else:
            self._met |= {("loss", kind), ("q", block, kind)} | ({("term", block, kind)} if state.active() else set())
        return loss

    def _can_draw(self, before: RandomState) -> bool:
        """Whether graphs draw what a step as it is draws: on the device, whose generator PyTorch registers with graphs, and
        in one pass, or as dropout masks that the passes after it share."""
        if not before.is_now_on_cpu() or not self.step.one_draw:
            return False
        return not self.state.mu or self.step.lagged or self.step.passes.repeats

    def _run(self, key: Any, piece: Piece, batch: Any, *, after: bool = False) -> Tensor | None:
        """A piece of a step: as it is the first time, from its graph from then on. One `after` another reads the same batch and
        adds to the same gradients."""
        if key not in self._graphs:
            if not after:
                self._clear()
                batch = laid_out(batch, self.net)
            if self.refused is None and not self._first(key):
                try:
                    self._graphs[key] = self._capture(piece, batch, after=after)
                except RefusedError as error:
                    self._refuse(error)
            if key not in self._graphs:  # no longer within `except`: the error holds what its capture took
                return self._now(piece, batch)
        return self._replay(self._graphs[key], batch)

    def _now(self, piece: Callable[..., R], batch: Any) -> R:
        """Not from a graph; a replay needs no precision, and to enter it takes time."""
        with self._precision():
            return piece(*batch)

    def _refuse(self, error: RefusedError) -> None:
        self.refused = str(error)
        self._forget()

    def _capture(self, piece: Piece, batch: Any, *, after: bool = False) -> Captured:
        state, parameters = self.state, list(self.net.parameters())
        held = [p.grad for p in parameters]
        self.net.zero_grad(set_to_none=True)
        put = torch._foreach_add_ if after else torch._foreach_copy_
        self._settle()
        direction = state.direction
        before, under_way = (state.statistics, direction.choice, state.loss), state.current
        block = direction.block()
        direction.choice = known = None if block is None else BlockChoice.known(block)
        self._grads = self._grads or {p: torch.empty_like(p) for p in parameters}

        def work() -> Tensor | None:
            loss = self._now(piece, batch)
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
            taped = state.current if under_way is None and state.current is not None and state.current.kept else None
            read = (*parameters, *self.net.buffers(), *tensors_in(batch))
            return Captured(graph, batch, loss, grads, after, statistics, choice, taped, Versions.of(read))
        except RefusedError:  # the step as it is may need the memory
            state.current, state.collector, state.along = under_way, None, None
            raise
        finally:
            state.statistics, direction.choice, state.loss = before
            direction.pairs = self._static
            for parameter, grad in zip(parameters, held, strict=True):
                parameter.grad = grad

    def _replay(self, captured: Captured, batch: Any) -> Tensor | None:
        state = self.state
        self._settle()
        if captured.batch is not batch:
            refill(captured.leaves, batch)
        captured.graph.replay()
        if not captured.after:
            self._leave(captured.grads)
        if captured.taped is not None:
            state.current = captured.taped
            captured.versions.put_back()  # the replay computed it with the parameters as they are
        if captured.choice is not None:
            state.direction.choice = BlockChoice.of(captured.choice.index.number, captured.choice.blocks)
        if captured.statistics is not None:
            state.statistics = captured.copy_statistics()
        return None if captured.loss is None else captured.loss.clone()

    def _gradients(self, parameters: tuple[nn.Parameter, ...]) -> Gradients:
        """Where graphs leave the gradients of these, the same list for the same parameters."""
        return self._kept.setdefault(parameters, [(p, self._grads[p]) for p in parameters])

    def _leave(self, grads: Gradients) -> None:
        if self._left is not grads or any(parameter.grad is not grad for parameter, grad in grads):
            self._clear()
            self._left = grads
            for parameter, grad in grads:
                parameter.grad = grad

    def _clear(self) -> None:
        self.net.zero_grad(set_to_none=True)
        self._left = None

    def _settle(self) -> None:
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
        return self._start_anew

    def _start_anew(self) -> None:
        self._forget()
        self._met = set()
