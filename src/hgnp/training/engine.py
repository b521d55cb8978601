"""Whole steps in CUDA graphs.

What a step does depends on the host in two points, the block that is penalised and whether the hinge is open: for each block
that was chosen and each shape of a batch there is a graph of the pass forward, which shows q, and two of the way back. In the
paper's order a step is three graphs: C forward and back, which shows v; then, once the host knows the block, q along it; then,
if it knows the hinge to be open, the gradient of the term. A removal forgets all graphs.

What a graph computes is what `Flatness.backward` (or `SAM.backward`) computes, from the same parameters, buffers and
eigenvectors in place. The optimizer's step stays outside, so that any optimizer and schedule will do; it has a graph of its own
where it can (`stepping`).
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hgnp.baselines import SAM
from hgnp.curvature.check import hooked
from hgnp.curvature.operations import tensors_in
from hgnp.curvature.random import RandomState
from hgnp.curvature.rhythm import Kind
from hgnp.curvature.spectrum import Chosen, Pair
from hgnp.flatness import Flatness
from hgnp.graphs import Capture, RefusedError, built_of, kind_of, laid_out, refill
from hgnp.removal import Removal, listen
from hgnp.training.captured import Captured, Versions, copied, copy_into, tensors_of
from hgnp.training.stepping import Gradients, Stepping

Piece = Callable[[Any, Any], Tensor | None]
Precision = Callable[[], contextlib.AbstractContextManager[Any]]
R = TypeVar("R")


class Engine:
    """Stands in for a `Flatness` or a `SAM` in a training loop on a GPU."""

    def __init__(self, trainer: Flatness | SAM, precision: Precision = contextlib.nullcontext) -> None:
        self.trainer, self.net, self._precision = trainer, trainer.net, precision
        self.flatness = trainer if isinstance(trainer, Flatness) else None
        self.device = next(self.net.parameters()).device
        self.refused: str | None = None
        """Why steps are not captured, if they are not."""
        if self.flatness is not None and self.flatness.choices.fisher_type == "mc":
            self.refused = "its labels are drawn"  # a graph would draw the same again and again
        self._capture_at = Capture(self.device)
        self._stepping = Stepping(self._capture_at)
        self._mu = torch.zeros((), device=self.device)
        self._known: float | None = None
        self._graphs: dict[Any, Captured] = {}
        self._met: set[Any] = set()
        self._static: dict[str, Pair] = {}
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
        """As the trainer's `backward`, in place of the gradients that are there."""
        batch, (upcoming, kind) = (inputs, target), self._upcoming
        self._upcoming = None, None
        if upcoming is None or upcoming[0] is not inputs or upcoming[1] is not target:
            kind = kind_of(batch, self.device)
        if self.refused is not None:
            self._forget()
        if self.refused is not None or kind is None or isinstance(scale, Tensor) or scale != 1:
            self._clear()
            return self._now(partial(self.trainer.backward, scale=scale), batch)
        if self._first(kind):
            return self._as_it_is(kind, batch)
        return self._step(kind, batch)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's, on the gradients that `backward` left."""
        self._stepping.step(optimizer, self._left)

    def begin_epoch(self) -> None:
        """Whatever was done to network, gradients and optimizer since the last step is seen."""
        self._left = None
        self._stepping.forget()
        numbers = {
            name: value for name, value in vars(self.trainer).items() if name != "mu" and isinstance(value, float)
        }
        built = built_of(self.net, self.trainer.loss), hooked(self.net), numbers
        if self._built != built:
            self._start_anew()
            self._built = built

    def _step(self, kind: Any, batch: Any) -> Tensor:
        flat = self.flatness
        if flat is None or flat.mu == 0:
            loss = self._run(("plain", kind), self.trainer.backward, batch)
        else:
            self._settle(flat)  # before a graph is looked up: layers that only some batches meet make all graphs anew
            if not flat.lags:
                self._run(("look", kind), flat.prepare, batch)
            loss = self._go_on(flat, kind, batch) if flat.in_two_passes else self._along_known(flat, kind, batch)
        assert loss is not None
        return loss

    def _along_known(self, flat: Flatness, kind: Any, batch: Any) -> Tensor | None:
        step = flat.kind()
        key = step, flat.v.name() if step.term else None, kind
        if not {key, ("ahead", key)} & self._graphs.keys() and flat.v.block() is None:  # nothing is known of v yet
            self._clear()
            return self._now(flat.backward, batch)
        if step.term:
            loss: Tensor | None = self._fork(flat, step, key, batch)
        else:
            loss = self._run(key, partial(flat.run, step), batch)
        flat.done(step)
        return loss

    def _fork(self, flat: Flatness, step: Kind, key: Any, batch: Any) -> Tensor | None:
        """A step in two graphs: forward, and back with the term or without once the host knows q."""
        try:
            if ("ahead", key) not in self._graphs:
                self._clear()
                batch = laid_out(batch, self.net)
                if self.refused is not None or self._first(key) or not self._forked(flat, step, key, batch):
                    return self._now(partial(flat.run, step), batch)
            ahead = self._graphs["ahead", key]
            loss = self._replay(ahead, batch)
            self._look_ahead()
            self._replay(self._graphs["open" if flat.opened else "closed", key], ahead.batch)
            return loss
        finally:
            flat.finish()

    def _forked(self, flat: Flatness, step: Kind, key: Any, batch: Any) -> bool:
        """Captures all three graphs, or none."""
        try:
            ahead = self._capture(partial(flat.ahead, renew=step.renew), batch, after=True)  # it leaves no gradients
            closed = self._capture(partial(flat.go_back, opened=False, retain_graph=True), batch)
            opened = self._capture(partial(flat.go_back, opened=True), batch)  # lets the pass go on its way
        except RefusedError as error:
            flat.finish()  # the step as it is may need the memory
            self._refuse(error)
            return False
        self._graphs |= {("ahead", key): ahead, ("open", key): opened, ("closed", key): closed}
        return True

    def _go_on(self, flat: Flatness, kind: Any, batch: Any) -> Tensor:
        """The rest of a step in the paper's order: C has gone back already."""
        assert flat.first is not None
        loss = flat.first.loss.detach().clone()
        look = self._graphs.get(("look", kind))
        batch = batch if look is None else look.batch
        try:
            ahead = self._graphs.get(("q", self._block, kind))
            if ahead is not None:  # most often the block is the same again: q is under way while the host learns of it
                self._replay(ahead, batch)
                self._look_ahead()
            block = flat.v.name()
            q, term = ("q", block, kind), ("term", block, kind)
            if ahead is None or block != self._block:
                self._run(q, flat.measure, batch, after=True)
            self._block = block
            if flat.opened:
                captured_now = term in self._met and term not in self._graphs
                if captured_now:  # it goes back through a q that was captured just before it
                    self._graphs.pop(q, None)
                    self._run(q, flat.measure, batch, after=True)
                self._run(term, flat.penalise, batch, after=True)
        finally:
            flat.finish()
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

    def _as_it_is(self, kind: Any, batch: Any) -> Tensor:
        """Not captured, as what draws random numbers in ways that graphs cannot repeat never will be."""
        flat = self.flatness
        step = None if flat is None or flat.mu == 0 else flat.kind()
        before = RandomState(*self.net.parameters())
        self._clear()
        loss = self._now(self.trainer.backward, laid_out(batch, self.net))
        if not before.is_now() and not self._can_draw(before):
            self.refused = "its forward draws random numbers"
        elif hooked(self.net):
            self.refused = "hooks see its gradients"
        elif flat is None or step is None:
            self._met.add(("plain", kind))
        elif flat.in_two_passes:
            self._met |= {("look", kind), ("q", flat.block, kind)} | (
                {("term", flat.block, kind)} if flat.opened else set()
            )
        else:
            self._met.add((step, flat.block if step.term else None, kind))
        return loss

    def _can_draw(self, before: RandomState) -> bool:
        """Whether graphs draw what a step as it is draws: on the device, whose generator PyTorch registers with graphs, and
        in one pass, or as dropout masks that the passes after it share."""
        flat = self.flatness
        if flat is None or not before.is_now_on_cpu():
            return False
        return not flat.mu or not flat.in_two_passes or flat.passes.repeats

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
        flat, parameters = self.flatness, list(self.net.parameters())
        held = [p.grad for p in parameters]
        self.net.zero_grad(set_to_none=True)
        before = None if flat is None else (flat.seen, flat.v.chosen, flat.first)
        put = torch._foreach_add_ if after else torch._foreach_copy_
        known: Chosen | None = None
        if flat is not None:
            self._settle(flat)
            block = flat.v.block()
            flat.weight = self._mu
            flat.v.chosen = known = None if block is None else Chosen.known(block)
        self._grads = self._grads or {p: torch.empty_like(p) for p in parameters}

        def work() -> Tensor | None:
            loss = self._now(piece, batch)
            if flat is not None and flat.v.chosen is not known:
                copy_into(self._memory, tensors_of(flat.v.pairs, self._static))
            fresh = [(self._grads[p], p.grad) for p in parameters if p.grad is not None]
            if fresh:  # all graphs leave their gradients in the same memory
                put([kept for kept, _ in fresh], [grad for _, grad in fresh])
            return loss

        try:
            graph, loss = self._capture_at.capture(work)
            grads = self._gradients(tuple(p for p in parameters if p.grad is not None))
            if flat is None or before is None:
                return Captured(graph, batch, loss, grads, after, None, None, None, None)
            seen = None if flat.seen is before[0] else flat.seen
            choice = None if flat.v.chosen is known else flat.v.chosen
            first = None if flat.first is before[2] else flat.first
            read = (*parameters, *self.net.buffers(), *tensors_in(batch))
            return Captured(graph, batch, loss, grads, after, seen, choice, first, Versions.of(read))
        finally:
            if flat is not None and before is not None:
                flat.weight = None
                flat.seen, flat.v.chosen, flat.first = before
                flat.v.pairs = self._static
            for parameter, grad in zip(parameters, held, strict=True):
                parameter.grad = grad

    def _replay(self, captured: Captured, batch: Any) -> Tensor | None:
        flat = self.flatness
        if flat is not None:
            if self._known != flat.mu:
                self._known = flat.mu
                self._mu.fill_(flat.mu)
            self._settle(flat)
        if captured.batch is not batch:
            refill(captured.leaves, batch)
        captured.graph.replay()
        if not captured.after:
            self._leave(captured.grads)
        if flat is not None and captured.first is not None:
            flat.first = captured.first
            assert captured.versions is not None
            captured.versions.put_back()  # the replay computed it with the parameters as they are
        if flat is not None and captured.choice is not None:
            flat.v.chosen = Chosen.of(captured.choice.index.number, captured.choice.blocks)
        if flat is not None and captured.seen is not None:
            flat.seen = captured.copy_seen()
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

    def _settle(self, flat: Flatness) -> None:
        """The eigenpairs in the memory that graphs read and write."""
        pairs = flat.v.pairs
        if pairs is not self._static:
            if pairs.keys() != self._static.keys():
                self._forget()
                self._static = {name: copied(pair) for name, pair in pairs.items()}
                self._memory = tensors_of(self._static, self._static)
            elif any(pairs[name] is not self._static[name] for name in pairs):
                copy_into(self._memory, tensors_of(pairs, self._static))
            flat.v.pairs = self._static

    def _forget(self) -> None:
        self._graphs.clear()
        self._static, self._memory, self._grads, self._kept = {}, [], {}, {}
        self._stepping.forget()
        self._capture_at.forget()

    def neurons_removed(self, removal: Removal) -> Callable[[], None]:
        return self._start_anew

    def _start_anew(self) -> None:
        self._forget()
        self._met = set()
