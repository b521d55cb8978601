"""Whole steps in CUDA graphs.

A small network's step is a few thousand kernels of microseconds each, and launching them takes longer than running them. A
CUDA graph launches them all at once. What a step does depends on the host in one point, the block that is penalised: there
is a graph for each block that was chosen and each shape of a batch. The first step of a kind runs as it is (libraries choose
their algorithms), the second is captured, and from then on it is replayed. A removal forgets all graphs.

What a graph computes is what `Flatness.backward` computes, from the same parameters, buffers and eigenvectors in place; only
the optimizer's step stays outside, so that any optimizer and schedule will do.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hgnp.curvature.spectrum import Chosen, Pair
from hgnp.flatness import Flatness, Seen
from hgnp.messages import first_line
from hgnp.removal import Removal, listen

Piece = Callable[[Any, Any], Tensor | None]


@dataclass(frozen=True)
class Captured:
    """One graph: where it reads its batch from and where it leaves what it found."""

    graph: torch.cuda.CUDAGraph
    batch: list[Tensor]
    loss: Tensor | None
    grads: list[tuple[nn.Parameter, Tensor]]
    seen: Seen | None
    choice: Chosen | None
    """The next block, on the device."""


class Engine:
    """Stands in for a `Flatness` in a training loop on a GPU."""

    def __init__(self, flatness: Flatness) -> None:
        self.flatness, self.net = flatness, flatness.net
        self.device = next(self.net.parameters()).device
        self.stream = torch.cuda.Stream(self.device)
        self.refused: str | None = None
        """Why steps are not captured, if they are not."""
        self._mu = torch.zeros((), device=self.device)
        self._known: float | None = None
        self._graphs: dict[Any, Captured] = {}
        self._met: set[Any] = set()
        self._static: dict[str, Pair] = {}
        self._pool: Any = None
        listen(self.net, self.neurons_removed)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around the steps of an epoch: all of them on one stream, with algorithms chosen by trying them."""
        current, benchmark = torch.cuda.current_stream(self.device), torch.backends.cudnn.benchmark
        self.stream.wait_stream(current)
        torch.backends.cudnn.benchmark = True
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            torch.backends.cudnn.benchmark = benchmark
            current.wait_stream(self.stream)

    def backward(self, inputs: Any, target: Any, *, scale: float | Tensor = 1.0) -> Tensor:
        """As `Flatness.backward`, on gradients that are None."""
        flat = self.flatness
        leaves, spec = tree_flatten((inputs, target))
        fits = all(isinstance(leaf, Tensor) for leaf in leaves) and isinstance(scale, float)
        kind = (str(spec), *((leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor)))
        if self.refused is not None or not fits or self._first(kind):
            return self._as_it_is(inputs, target, scale)
        try:
            if flat.mu == 0:
                loss = self._run(("plain", kind), flat.backward, leaves, spec)
            else:
                if not flat.lags:
                    self._run(("look", kind), flat.prepare, leaves, spec)
                block = flat.v.block()
                if block is None:  # nothing is known of v yet
                    return flat.backward(inputs, target)
                renew = flat.renews
                loss = self._run(("step", block.name, renew, kind), partial(flat.step, renew=renew), leaves, spec)
                flat.age = 0 if renew else flat.age + 1
        except _RefusedError as error:
            self.refused = str(error)
            self._forget()
            return flat.backward(inputs, target, scale=scale)
        assert loss is not None
        return loss

    def _first(self, key: Any) -> bool:
        """Whether there has been no step of this kind yet."""
        new = key not in self._met
        self._met.add(key)
        return new

    def _as_it_is(self, inputs: Any, target: Any, scale: float | Tensor) -> Tensor:
        """Not captured. A network that draws random numbers never will be: the draw must repeat from pass to pass."""
        if self.refused is not None:
            return self.flatness.backward(inputs, target, scale=scale)
        before = torch.cuda.get_rng_state(self.device)
        loss = self.flatness.backward(inputs, target, scale=scale)
        if not torch.equal(before, torch.cuda.get_rng_state(self.device)):
            self.refused = "its forward draws random numbers"
        return loss

    def _run(self, key: Any, piece: Piece, leaves: list[Tensor], spec: Any) -> Tensor | None:
        """A piece of a step: as it is the first time, from its graph from then on."""
        if key not in self._graphs:
            if self._first(key):
                inputs, target = tree_unflatten(leaves, spec)
                return piece(inputs, target)
            self._graphs[key] = self._capture(piece, leaves, spec)
        return self._replay(self._graphs[key], leaves)

    def _capture(self, piece: Piece, leaves: list[Tensor], spec: Any) -> Captured:
        flat = self.flatness
        batch = [_laid_out(leaf) for leaf in leaves]
        inputs, target = tree_unflatten(batch, spec)
        block = flat.v.block()
        self._settle()
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        before = flat.seen, flat.v.chosen
        held = [p.grad for p in self.net.parameters()]
        flat.weight = self._mu
        flat.v.chosen = known = None if block is None else Chosen.known(block)
        self.net.zero_grad(set_to_none=True)
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"):
                loss = piece(inputs, target)
                new = [tensor for name in sorted(self._static) for tensor in _tensors(flat.v.pairs[name])]
                torch._foreach_copy_(self._memory(), new) if flat.v.chosen is not known else None
            grads = [(p, p.grad) for p in self.net.parameters() if p.grad is not None]
            choice = None if flat.v.chosen is known else flat.v.chosen
            seen = None if flat.seen is before[0] else flat.seen
            return Captured(graph, batch, loss, grads, seen, choice)
        except Exception as error:
            raise _RefusedError(first_line(error)) from error
        finally:
            flat.weight = None
            flat.seen, flat.v.chosen = before
            flat.v.pairs = dict(self._static)
            for parameter, grad in zip(self.net.parameters(), held, strict=True):
                parameter.grad = grad

    def _replay(self, captured: Captured, leaves: list[Tensor]) -> Tensor | None:
        flat = self.flatness
        if self._known != flat.mu:
            self._known = flat.mu
            self._mu.fill_(flat.mu)
        self._settle()
        torch._foreach_copy_(captured.batch, leaves)
        captured.graph.replay()
        for parameter, grad in captured.grads:
            parameter.grad = grad
        if captured.choice is not None:
            flat.v.chosen = Chosen.of(captured.choice.index, captured.choice.blocks)
        if captured.seen is not None:
            seen = captured.seen
            flat.seen = Seen(seen.block, seen.direction, seen.radius.clone(), seen.residual, seen.curvature.clone())
        return None if captured.loss is None else captured.loss.clone()

    def _settle(self) -> None:
        """The eigenpairs in the memory that graphs read and write."""
        pairs = self.flatness.v.pairs
        if pairs.keys() != self._static.keys():
            self._forget()
            self._static = {name: _copied(pair) for name, pair in pairs.items()}
        elif any(pairs[name] is not self._static[name] for name in pairs):
            torch._foreach_copy_(self._memory(), [t for name in sorted(pairs) for t in _tensors(pairs[name])])
        self.flatness.v.pairs = dict(self._static)

    def _memory(self) -> list[Tensor]:
        return [tensor for name in sorted(self._static) for tensor in _tensors(self._static[name])]

    def _forget(self) -> None:
        self._graphs.clear()
        self._static = {}
        self._pool = None  # it goes with its last graph

    def neurons_removed(self, removal: Removal) -> Callable[[], None]:
        def commit() -> None:
            self._forget()
            self._met = set()

        return commit


class _RefusedError(Exception):
    """A step that cannot be captured."""


def _laid_out(leaf: Tensor) -> Tensor:
    """A copy to be refilled, pictures with their channels last."""
    form = torch.channels_last if leaf.dim() == 4 and leaf.is_floating_point() else torch.preserve_format
    return leaf.clone(memory_format=form)


def _copied(pair: Pair) -> Pair:
    return Pair.of_state({name: tensor.clone() for name, tensor in pair.state().items()})


def _tensors(pair: Pair) -> list[Tensor]:
    return [tensor for _, tensor in sorted(pair.state().items())]
