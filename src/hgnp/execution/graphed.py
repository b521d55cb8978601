"""The stages of a step from CUDA graphs.

A step is captured in pieces, as it depends on the host at two points: the block that is penalised and whether the penalty is
active. For each block that was chosen and each shape of a batch there is a graph of forward, which gives q, and two of
backward. In the paper's order a step is three graphs: C forward and backward, which gives v; then, once the host knows the
block, q along it; then, if it is active, the gradient of the penalty. A piece runs eagerly the first time and is captured
the second (`captured` lists the pieces). A removal drops all graphs.

A graph computes what the stages compute, from the same parameters, buffers and eigenvectors in place. The optimizer's step
stays outside, so that any optimizer and schedule is possible; it has its own graph where possible (`optimizer`).

Ranks sum between graphs: n and w before a step, C and q after its forward pass, gradients at its end. Pieces that refresh v
have sums within, at which their capture is split (`graphs.between_graphs`). A capture itself sums nothing, and a step sums as
often as `Eager`'s, so that ranks may capture at different times, or not at all.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hgnp.curvature.autodiff.operations import tensors_in
from hgnp.curvature.autodiff.rng import RandomState
from hgnp.curvature.step import PLAIN, Number, State, Step
from hgnp.curvature.validation import has_gradient_hooks, has_module_hooks
from hgnp.execution.captured import GRADIENTS, Captured, EigenpairMemory, GraphKey, PieceName, Versions
from hgnp.execution.eager import AutocastFactory, Eager
from hgnp.execution.graphs import CaptureContext, CaptureError, copied_batch, fingerprint, shape_key
from hgnp.execution.optimizer import Gradients, GraphedOptimizer
from hgnp.removal import Removal, listen

Piece = Callable[[Any, Any], Tensor | None]
"""The stages that one graph holds, as a function of a batch. It returns C, if the piece computes it."""
R = TypeVar("R")


class Graphed:
    """Runs the stages of `step` over `state` from CUDA graphs, where they can be captured."""

    uses_graphs = True

    def __init__(self, step: Step, state: State, precision: AutocastFactory = contextlib.nullcontext) -> None:
        self.step, self.state, self.net, self._precision = step, state, step.net, precision
        self._eager = Eager(step, state)  # `_run_eager` enters autocast around it
        self.device = next(self.net.parameters()).device
        self.refused = self._never_captured()
        """Why steps run eagerly, if they do."""
        self._capture_context = CaptureContext(self.device)
        self._optimizer = GraphedOptimizer(self._capture_context)
        dtype = torch.promote_types(torch.float32, next(self.net.parameters()).dtype)
        self._mu = torch.zeros((), dtype=dtype, device=self.device)
        self._known_mu: float | None = None
        self._weight = torch.zeros((), dtype=torch.double, device=self.device)
        """w, where graphs read it."""
        self._graphs: dict[GraphKey, Captured] = {}
        self._warmed_up: set[GraphKey] = set()
        """Pieces that have run eagerly: they are captured the next time."""
        self._shapes: set[Any] = set()
        """Of batches that had an eager step."""
        self._memory = EigenpairMemory()
        self._grad_memory: dict[nn.Parameter, Tensor] = {}
        """Where all graphs leave the gradients."""
        self._grad_lists: dict[tuple[nn.Parameter, ...], Gradients] = {}
        """Parameters → their memory, as one list for each set of parameters that has gradients."""
        self._attached: Gradients | None = None
        """The gradients of the last step, if they came from graphs."""
        self._last_block: str | None = None
        """Of the last step in the paper's order: the next one starts with q along it, before the host knows its own block."""
        self._built: Any = None
        """Fingerprint of what graphs were captured from."""
        self.fetch: Callable[[], Any] | None = None
        """Fetches the next batch: called before the host waits for the device."""
        self._upcoming: tuple[Any, Any] = None, None
        """The prefetched batch and its shape key."""
        listen(self.net, self.neurons_removed)

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Around the steps of an epoch: all of them on one stream."""
        return self._capture_context.running()

    def backward(self, inputs: Any, target: Any, *, scale: Number = 1.0) -> Tensor:
        """As `Eager.backward`, but replaces `.grad` instead of adding to it."""
        batch, (upcoming, shape) = (inputs, target), self._upcoming
        self._upcoming = None, None
        if upcoming is None or upcoming[0] is not inputs or upcoming[1] is not target:
            shape = shape_key(batch, self.device)
        if self.refused is not None or shape is None or isinstance(scale, Tensor) or scale != 1:
            self._drop_grads()
            self._eager.fetch = self.fetch
            try:
                return self._run_eager(partial(self._eager.backward, scale=scale), batch)
            finally:
                self._eager.fetch = None
        if shape not in self._shapes:
            self._shapes.add(shape)
            return self._first_of_shape(shape, batch)
        return self._step(shape, batch)

    def zero_grad(self) -> None:
        """Nothing: `backward` replaces gradients."""

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps on the gradients of the last `backward`."""
        self._optimizer.step(optimizer, self._attached)

    def begin_epoch(self) -> None:
        """Network, gradients and optimizer may have changed since the last step."""
        self._attached, self._upcoming = None, (None, None)
        self._optimizer.forget()
        built = fingerprint(self.net, self.step.loss), has_gradient_hooks(self.net), self.step.captured_numbers()
        if self._built != built:
            self._restart()
            self._built = built

    def _step(self, shape: Any, batch: Any) -> Tensor:
        """A step on a batch of a shape that had an eager step."""
        step, state = self.step, self.state
        plan = step.plan(state)
        step.share(state, *batch)
        if state.weight is not None:
            state.weight = self._weight.copy_(state.weight)
        if self._known_mu != (mu := step.penalty_weight(state)):
            self._known_mu = mu
            self._mu.fill_(mu)
        self._sync_eigenpairs()  # before a graph is looked up: a layer that no batch called before drops all graphs
        try:
            if plan == PLAIN:
                state.loss = self._run(self._key("plain", shape), self._plain, batch)
                step.decide(state)
            elif not step.lagged:
                self._in_papers_order(shape, batch)
            else:
                key = self._first_key(shape, state.direction.name())
                if key not in self._graphs and state.direction.block() is None:  # nothing is known of v yet
                    self._drop_grads()
                    return self._run_eager(self._eager.run_stages, batch)
                self._lagged(key, batch)
            self._sum_gradients()
            step.advance(state)
        finally:
            state.release()
        assert state.loss is not None
        return state.loss

    def _key(self, piece: PieceName, shape: Any, block: str | None = None) -> GraphKey:
        """Of a piece of the current step."""
        state = self.state
        samples = state.samples if state.plan.refresh and state.weight is not None else None
        return GraphKey(piece, state.plan, block, shape, samples)

    def _first_key(self, shape: Any, block: str | None) -> GraphKey:
        """Of the first piece of a step with lagged v."""
        if self.state.plan.penalty:
            return self._key("forward", shape, block)
        return self._key("unpenalized", shape)

    def _sum_gradients(self) -> None:
        """Over the ranks, in the memory that graphs leave them in."""
        if self.step.reducer.ranks == 1:
            return
        summed = self.step.summed_gradients()
        if self._attached is None or not self._grad_memory:  # some piece ran eagerly, or graphs are gone since
            self._attached = None
            for p, grad in summed:
                p.grad = grad
            return
        known = [(p, grad) for p, grad in summed if grad is not None]
        torch._foreach_copy_([self._grad_memory[p] for p, _ in known], [grad for _, grad in known])
        self._attach_grads(self._grad_list(tuple(p for p, _ in known)))

    # Pieces of a step: what one graph holds

    def _plain(self, inputs: Any, target: Any) -> Tensor | None:
        self.step.plain(self.state, inputs, target)
        self.state.release()
        return self.state.loss

    def _forward(self, inputs: Any, target: Any) -> Tensor | None:
        self.step.forward(self.state, inputs, target)
        return self.state.loss

    def _backward(self, inputs: Any, target: Any, *, active: bool, retain_graph: bool = False) -> None:
        self.step.backward_and_refresh(self.state, target, mu=self._mu, active=active, retain_graph=retain_graph)

    def _unpenalized(self, inputs: Any, target: Any) -> Tensor | None:
        self.step.forward(self.state, inputs, target)
        self.step.decide(self.state)
        self._backward(inputs, target, active=False)
        self.state.release()
        return self.state.loss

    def _loss(self, inputs: Any, target: Any) -> Tensor | None:
        """In the paper's order: C, its gradient, and v."""
        self.step.prepare(self.state, inputs, target)
        self.step.forward(self.state, inputs, target)
        self.step.backward_loss_and_refresh(self.state, target)
        return self.state.loss

    def _tangents(self, inputs: Any, target: Any) -> None:
        self.step.tangents(self.state, inputs, target)

    def _penalty(self, inputs: Any, target: Any) -> None:
        assert self.state.current is not None
        if self.state.current.q is None:
            self._tangents(inputs, target)
        self.step.backward_penalty(self.state, mu=self._mu, active=True)

    # A step, piece by piece

    def _lagged(self, key: GraphKey, batch: Any) -> None:
        """Without a penalty a step is one piece. With one it is two: forward, and backward with the penalty or without once the
        host knows q."""
        if key.piece == "unpenalized":
            self.state.loss = self._run(key, self._unpenalized, batch)
            return
        if key not in self._graphs:
            self._drop_grads()
            batch = copied_batch(batch, self.net)
            first = key not in self._warmed_up
            self._warmed_up.add(key)
            if self.refused is not None or first or not self._capture_all_three(key, batch):
                self._run_eager(self._uncaptured, batch)
                return
        forward = self._graphs[key]
        self.state.loss = self._replay(forward, batch)
        self.step.decide(self.state)
        self._prefetch()
        back = key._replace(piece="active" if self.state.active() else "inactive")
        self._replay(self._graphs[back], forward.batch)

    def _uncaptured(self, inputs: Any, target: Any) -> None:
        """The same stages, not captured."""
        self.step.forward(self.state, inputs, target)
        self.step.decide(self.state)
        self._backward(inputs, target, active=self.state.active())

    def _capture_all_three(self, key: GraphKey, batch: Any) -> bool:
        """Captures the graphs of forward and of both backward passes, or none."""
        inactive, active = key._replace(piece="inactive"), key._replace(piece="active")
        try:
            captured = (
                self._capture(key, self._forward, batch),
                self._capture(inactive, partial(self._backward, active=False, retain_graph=True), batch),
                self._capture(active, partial(self._backward, active=True), batch),  # frees the autograd graph
            )
        except CaptureError as error:
            self.state.release()  # the eager step may need the memory
            self._refuse(str(error))
            return False
        self._graphs |= {each.key: each for each in captured}
        return True

    def _in_papers_order(self, shape: Any, batch: Any) -> None:
        state = self.state
        loss_key = self._key("loss", shape)
        loss = self._run(loss_key, self._loss, batch)
        captured = self._graphs.get(loss_key)
        if captured is not None:
            batch = captured.batch  # the copy that its graph and those after it read
        ahead = self._graphs.get(self._key("q", shape, self._last_block))
        if ahead is not None:  # most often the block is the same again: q is under way while the host learns of it
            self._replay(ahead, batch)
            self._prefetch()
        block = state.direction.name()
        q, penalty = self._key("q", shape, block), self._key("penalty", shape, block)
        if ahead is None or block != self._last_block:
            self._run(q, self._tangents, batch)
        self._last_block, state.loss = block, loss
        self.step.decide(state)
        if state.active():
            decided = state.loss, state.statistics
            if penalty in self._warmed_up and penalty not in self._graphs:
                # it is captured now, and differentiates a q that was captured just before it
                self._graphs.pop(q, None)
                self._run(q, self._tangents, batch)
            self._run(penalty, self._penalty, batch)
            state.loss, state.statistics = decided  # q may have been computed again, as this rank has it

    def _prefetch(self) -> None:
        """Fetches the next batch before the host waits for the device."""
        upcoming = None if self.fetch is None else self.fetch()
        self._upcoming = upcoming, None if upcoming is None else shape_key(upcoming, self.device)

    def _first_of_shape(self, shape: Any, batch: Any) -> Tensor:
        """An eager step, which shows whether steps can be captured: not if graphs cannot repeat its random numbers, or hooks
        are to be called."""
        step, state = self.step, self.state
        before = RandomState(*self.net.parameters())
        self._drop_grads()
        loss = self._run_eager(self._eager.backward, copied_batch(batch, self.net))
        block = None if state.statistics is None else state.statistics.penalized.block.name
        if not before.unchanged() and not self._can_draw(before):
            self._refuse("its forward draws random numbers")
        elif has_gradient_hooks(self.net):
            self._refuse("hooks get its gradients")
        elif has_module_hooks(self.net):
            self._refuse("a replay calls no module hooks")
        elif state.plan == PLAIN:
            self._warmed_up.add(self._key("plain", shape))
        elif step.lagged:
            self._warmed_up.add(self._first_key(shape, block))
        else:
            self._warmed_up |= {self._key("loss", shape), self._key("q", shape, block)}
            if state.active():
                self._warmed_up.add(self._key("penalty", shape, block))
        return loss

    def _can_draw(self, before: RandomState) -> bool:
        """Whether graphs draw what an eager step draws: on the device, whose generator PyTorch registers with graphs, and in
        one pass, or as dropout masks that the passes after it share."""
        if not before.unchanged_on_cpu() or not self.step.draws_once:
            return False
        return not self.state.mu or self.step.lagged or self.step.passes.can_replay_tape

    def _run(self, key: GraphKey, piece: Piece, batch: Any) -> Tensor | None:
        """A piece of a step: eagerly the first time, from its graph from then on."""
        if key not in self._graphs:
            if GRADIENTS[key.piece] == "replace":  # the first of a step
                self._drop_grads()
                batch = copied_batch(batch, self.net)
            first = key not in self._warmed_up
            self._warmed_up.add(key)
            if self.refused is None and not first:
                try:
                    self._graphs[key] = self._capture(key, piece, batch)
                except CaptureError as error:
                    self._refuse(str(error))
            if key not in self._graphs:  # no longer within `except`: the error holds what its capture took
                return self._run_eager(piece, batch)
        return self._replay(self._graphs[key], batch)

    def _run_eager(self, piece: Callable[..., R], batch: Any) -> R:
        """Runs a piece eagerly. Only here is autocast entered, which takes time: a replay does not need it."""
        with self._precision():
            return piece(*batch)

    def _capture(self, key: GraphKey, piece: Piece, batch: Any) -> Captured:
        """The graph of a piece, which reads this copy of a batch. Nothing is computed yet."""
        state, parameters = self.state, list(self.net.parameters())
        put = torch._foreach_add_ if GRADIENTS[key.piece] == "add" else torch._foreach_copy_
        self._sync_eigenpairs()  # before memory is added: it may drop all there is
        missing = [p for p in parameters if p.requires_grad and p not in self._grad_memory]
        self._grad_memory |= {p: torch.empty_like(p) for p in missing}
        with _gradients_set_aside(parameters), state.recording():
            statistics, choice, under_way = state.statistics, state.direction.choice, state.current

            def work() -> Tensor | None:
                loss = self._run_eager(piece, batch)
                if state.direction.pairs is not self._memory.pairs:  # v was refreshed
                    self._memory.write(state.direction.pairs)
                fresh = [(self._grad_memory[p], p.grad) for p in parameters if p.grad is not None]
                if fresh:  # all graphs leave their gradients in the same memory
                    put([kept for kept, _ in fresh], [grad for _, grad in fresh])
                return loss

            graph, loss = self._capture_context.capture(work)
            made = state.current if under_way is None else None
            return Captured(
                key, graph, batch, loss,
                grads=self._grad_list(tuple(p for p in parameters if p.grad is not None)),
                statistics=None if state.statistics is statistics else state.statistics,
                choice=None if state.direction.choice is choice else state.direction.choice,
                taped=made if made is not None and made.in_cuda_graph else None,
                loss_differentiated=state.loss_differentiated,
                versions=Versions.of((*parameters, *self.net.buffers(), *tensors_in(batch))),
            )  # fmt: skip

    def _replay(self, captured: Captured, batch: Any) -> Tensor | None:
        self._sync_eigenpairs()
        # without a penalty nobody reads q, and of several ranks `decide` sends the sum
        send = captured.key.plan.penalty and self.step.reducer.ranks == 1
        loss = captured.replay(self.state, batch, send=send)
        if GRADIENTS[captured.key.piece] == "replace":
            self._attach_grads(captured.grads)
        return loss

    def _grad_list(self, parameters: tuple[nn.Parameter, ...]) -> Gradients:
        """Where graphs leave the gradients of these, the same list for the same parameters."""
        return self._grad_lists.setdefault(parameters, [(p, self._grad_memory[p]) for p in parameters])

    def _attach_grads(self, grads: Gradients) -> None:
        """Makes `.grad` the memory that graphs leave gradients in, unless it is already."""
        if self._attached is not grads or any(parameter.grad is not grad for parameter, grad in grads):
            self._drop_grads()
            self._attached = grads
            for parameter, grad in grads:
                parameter.grad = grad

    def _drop_grads(self) -> None:
        self.net.zero_grad(set_to_none=True)
        self._attached = None

    def _sync_eigenpairs(self) -> None:
        """The eigenpairs in the memory that graphs read and write."""
        direction = self.state.direction
        if direction.pairs is not self._memory.pairs:
            if direction.pairs.keys() != self._memory.pairs.keys():
                self._forget()
            self._memory.adopt(direction)

    def _never_captured(self) -> str | None:
        """Why no step can be captured, whatever the network, if so."""
        drawn = self.step.choices.fisher_type == "mc"  # a graph would draw the same at every replay
        return "its labels are drawn" if drawn else None

    def _refuse(self, reason: str) -> None:
        """Steps run eagerly from now on, until the network changes."""
        self.refused, self._attached = reason, None
        self._forget(release=True)

    def _forget(self, *, release: bool = False) -> None:
        """Drops all graphs, and releases their memory or keeps it for the next ones."""
        self._graphs.clear()
        self._memory, self._grad_memory, self._grad_lists = EigenpairMemory(), {}, {}
        self._optimizer.forget()
        self._capture_context.forget(release=release)

    def neurons_removed(self, removal: Removal) -> Callable[[], None]:
        return self._restart

    def _restart(self) -> None:
        """The network has changed: nothing is known of its steps."""
        self._forget()
        self._warmed_up, self._shapes, self.refused = set(), set(), self._never_captured()


@contextlib.contextmanager
def _gradients_set_aside(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Inside, `.grad` is None at first; in the end it is what it was."""
    held = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(parameters, held, strict=True):
            p.grad = grad
