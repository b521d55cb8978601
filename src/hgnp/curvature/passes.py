"""Passes through the network: C and q along v, and what they showed."""

import contextlib
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from hgnp.curvature.bends import Bends, Reasons, described
from hgnp.curvature.blocks import Block, find_blocks
from hgnp.curvature.check import hooked, tracked
from hgnp.curvature.choices import Choices
from hgnp.curvature.direction import Direction
from hgnp.curvature.forward import Forward, Output, UnfitError, autocast_off, run
from hgnp.curvature.gauss_newton import GaussNewton
from hgnp.curvature.hessian import Hessian
from hgnp.curvature.losses import Loss, LossCurvature
from hgnp.curvature.random import RandomState, capturing
from hgnp.curvature.seen import Seen
from hgnp.curvature.spectrum import Observer
from hgnp.curvature.tape import Tape
from hgnp.modes import layer_of


@dataclass(frozen=True)
class Pass:
    """A forward pass along v, still to be differentiated."""

    loss: Tensor
    z: Any
    q: Tensor
    observer: Observer | None
    seen: Seen

    def acts(self, bound: float) -> bool:
        """Whether q has to be differentiated: not if the hinge is known to be closed. On a GPU nobody waits to know."""
        return self.q.device.type != "cpu" or bool(self.q > bound)


@dataclass(frozen=True)
class First:
    """A batch's forward pass in the paper's order, before v is known."""

    loss: Tensor
    z: Any
    tape: Tape | None  # None where operations cannot be run again
    kept: bool  # whether it will be differentiated again
    went_back: bool  # whether C's gradient is in .grad
    buffers: dict[str, Tensor]  # as they were before it; norms that write theirs do not read them
    random: RandomState | None  # as it was before it; None in a capture


class Passes:
    def __init__(
        self, net: nn.Module, loss: Loss, output: Output | None, choices: Choices, curvature: LossCurvature | None
    ) -> None:
        self.net, self.loss, self.output = net, loss, output
        self._choices, self._curvature = choices, curvature
        self._bends: dict[bool, Reasons] = {}
        self._lost: dict[bool, dict[str, str]] = {}
        """Mode → blocks whose tangent would be lost, with the operation that hides it."""
        self._told: set[tuple[str, str]] = set()
        self.draws = False
        """Whether a pass of this network draws random numbers."""
        self.repeats = True
        """Whether the first pass of a step can be run again from its tape: nothing but dropout masks was drawn."""

    def first(self, v: Direction, inputs: Any, target: Any, scale: float | Tensor) -> First:
        """C's own pass, forward and back, and v from it. It alone updates buffers."""
        observer, tape = v.observer(inputs), Tape()
        state = None if capturing() else RandomState(*self.net.parameters())
        unread = {id(buffer) for norm in tracked(self.net) for buffer in norm.buffers()}
        buffers = {name: buffer.clone() for name, buffer in self.net.named_buffers() if id(buffer) not in unread}
        mode = Forward(watch=observer, tape=tape)
        z = self.run(inputs, mode)
        loss = self.loss(z, target)
        if state is not None:
            self.draws, self.repeats = not state.is_now(), mode.repeats(state)

        def backward() -> None:
            self.back(loss * scale, retain_graph=self.repeats)

        cold, alone = v.block() is None, not hooked(self.net)
        if alone:
            v.update_by(backward, observer, loss, z, target, scale, cold=cold)
        else:
            v.update(observer, partial(v.pull, observer, loss, z, target, scale), cold=cold)
        return First(loss, z, tape if self.repeats else None, capturing(), alone, buffers, state)

    def along(
        self,
        v: Direction,
        inputs: Any,
        target: Any,
        *,
        renew: bool,
        traceless: bool = False,
        within: contextlib.AbstractContextManager[Any] | None = None,
        first: First | None = None,
    ) -> Pass:
        """C and q of one pass along v; with `renew`, an observer watches it for the next v. Of a pass that was made before
        only what is behind the block runs again, if it can be."""
        if self._choices.curvature == "ggn":
            self.trace(inputs)
        block = v.block()
        assert block is not None
        pair, seeds = v.pairs[block.name], v.seeds(block)
        observer = v.observer(inputs) if renew else None
        term, loss, z = self._mode(block, seeds, observer), None, None
        if first is not None and first.tape is not None:
            with contextlib.suppress(UnfitError):  # which a second pass raises by its layer
                if isinstance(term, GaussNewton) and first.tape.along(term, first.z) is not None:
                    loss, z = first.loss, first.z
            if z is None:
                term = self._mode(block, seeds, observer)
                with contextlib.suppress(UnfitError):
                    z = first.tape.again(term, [parameter for parameter, _ in seeds], first.z)
            term = self._mode(block, seeds, observer) if z is None else term
        if z is None:
            if first is not None and first.random is not None:
                first.random.restore()  # the second pass draws the same
            elif first is not None and self.draws:
                raise RuntimeError("a second pass cannot draw the same random numbers in a CUDA graph")
            before = None if first is None else first.buffers
            z = self.run(inputs, term, traceless=traceless or first is not None, within=within, before=before)
        loss = self.loss(z, target) if loss is None else loss
        with autocast_off(loss):
            q = term.quotient(loss, z, target)
        seen = Seen(block, [part.detach() for _, part in seeds], pair.value, pair.residuals, q.detach())
        return Pass(loss, z, q, observer, seen)

    def _mode(
        self, block: Block, seeds: list[tuple[Tensor, Tensor]], observer: Observer | None
    ) -> GaussNewton | Hessian:
        if not self._follows(block):
            return Hessian(seeds, watch=observer)
        assert self._curvature is not None
        return GaussNewton(seeds, self._curvature, watch=observer)

    def run(
        self,
        inputs: Any,
        mode: Forward | None = None,
        *,
        traceless: bool = False,
        within: contextlib.AbstractContextManager[Any] | None = None,
        before: dict[str, Tensor] | None = None,
    ) -> Any:
        """The network's output; a traceless run works on copies of the buffers, some as they were `before`."""
        buffers = {name: buffer.clone() for name, buffer in self.net.named_buffers()} if traceless else None
        if buffers is not None and before is not None:
            buffers |= before
        try:
            with mode or contextlib.nullcontext(), within or contextlib.nullcontext():
                z = run(self.net, inputs, output=self.output, buffers=buffers)
            if (
                mode is not None and mode.unfit is not None
            ):  # the network's own code has caught it and taken another path
                raise mode.unfit
            return z
        except UnfitError as error:
            raise ValueError(f"layer {layer_of(self.net, error)!r}: {error}") from error
        finally:
            if mode is not None:
                mode.unfit = None  # they would hold each other

    def back(self, total: Tensor, *, retain_graph: bool = False) -> None:
        try:
            with autocast_off(total):
                total.backward(retain_graph=retain_graph)
        except RuntimeError as error:
            if "is not implemented" in str(error):
                raise ValueError(
                    f"net: PyTorch has no further derivative of one of its operations ({error})"
                ) from error
            raise

    def trace(self, inputs: Any) -> None:
        """Where Gauss–Newton and Hessian part, once for each mode of the network."""
        if self.net.training in self._bends:
            return
        mode = Bends(find_blocks(self.net))
        with RandomState(*self.net.parameters()):
            reasons = mode.end(self.run(inputs, mode, traceless=True))
        self._bends[self.net.training], self._lost[self.net.training] = reasons, mode.lost

    def _follows(self, block: Block) -> bool:
        """Whether q along the block is Gauss–Newton's. Where that was asked for and an operation hides the block's tangent, it
        is the Hessian's: v may come to such a block late in a run, and to refuse it then would cost the run's work."""
        hidden = self._lost.get(self.net.training, {}).get(block.name)
        if self._choices.curvature == "ggn" and hidden is not None and (block.name, hidden) not in self._told:
            self._told.add((block.name, hidden))
            warnings.warn(
                f"layer {block.name!r}: Gauss–Newton cannot follow {hidden} behind it (a custom autograd.Function or scripted "
                "code), so its curvature is the Hessian's; curvature='hessian' takes that for all layers",
                stacklevel=2,
            )
        return self._choices.curvature == "ggn" and hidden is None

    @property
    def routes(self) -> dict[str, str]:
        """As `Flatness.routes`."""
        mode, curvature = self.net.training, self._choices.curvature
        routes = described(self._bends.get(mode, {}), curvature)
        lost = self._lost.get(mode, {}) if curvature == "ggn" else {}
        return routes | {name: f"hessian, as Gauss–Newton cannot follow {each}" for name, each in lost.items()}

    def forget(self) -> None:
        """The network has changed."""
        self._bends, self._lost = {}, {}
