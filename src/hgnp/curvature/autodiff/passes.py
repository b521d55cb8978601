"""Passes through the network: C alone, or C with q along v.

q = vᵀHv is Gauss–Newton's, by tangents that the forward pass carries, or the full Hessian's: by second-order tangents where all
operations after the block have rules for them and the loss is one of PyTorch's, by two reverse passes elsewhere. In the
paper's order v is known only after the forward and backward pass of C: q then reuses the operations of that pass from its tape.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from hgnp.curvature.autodiff.forward import (
    CHECKPOINTED,
    CHECKPOINTED_NETWORK,
    Forward,
    LayerObserver,
    Output,
    UnsupportedOperationError,
    autocast_off,
    derivatives_explained,
    run,
)
from hgnp.curvature.autodiff.gauss_newton import GaussNewton
from hgnp.curvature.autodiff.hessian import Hessian
from hgnp.curvature.autodiff.linearity import Linearity, Reasons, described
from hgnp.curvature.autodiff.operations import tensors_in
from hgnp.curvature.autodiff.rng import RandomState
from hgnp.curvature.autodiff.second_tangent import SecondTangent
from hgnp.curvature.autodiff.tangent import Tangent
from hgnp.curvature.autodiff.tape import Tape
from hgnp.curvature.device import capturing
from hgnp.curvature.factors import Block, WholeNetwork, find_blocks
from hgnp.curvature.losses import Loss, LossCurvature, loss_curvature, weighted
from hgnp.curvature.validation import (
    REENTRANT,
    lacks_second_derivative,
    tracked,
    without_tensor_hooks,
)
from hgnp.errors import InputError
from hgnp.reducer import Reducer
from hgnp.removal import Removal, listen
from hgnp.state_guards import compiled_functions_run_eagerly, module_that_raised

ParameterTangents = list[tuple[Tensor, Tensor]]
"""Parameters, each with its part of v."""
Mode = GaussNewton | SecondTangent | Hessian
"""How a pass yields q."""
Weight = Tensor | None
"""This rank's share of the loss; None: it has all of it."""


@dataclass(frozen=True)
class Pass:
    """A forward pass that is still to be differentiated."""

    loss: Tensor
    """w·C, this rank's share of the loss."""
    output: Any
    q: Tensor | None = None
    """w·vᵀHv, where it was taken."""
    tangent: Tensor | None = None
    """u, the output's derivative along v, where q is Gauss–Newton's."""
    tape: Tape | None = None
    """Its operations, where they can be run again."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """As they were before it, without running statistics: a norm that updates its own does not read them."""
    random: RandomState | None = None
    """As it was before it; None in a capture."""
    in_cuda_graph: bool = False
    """A CUDA graph recomputes it: keep its autograd graph."""


class Passes:
    """The passes of one network. It caches properties of the network's operations, and nothing of a batch."""

    def __init__(
        self,
        net: nn.Module,
        loss: Loss,
        output: Output | None,
        *,
        gauss_newton: bool,
        over_network: bool = False,
        reducer: Reducer,
    ) -> None:
        self.net, self.loss, self.output = net, loss, output
        self._gauss_newton, self._over_network, self._reducer = gauss_newton, over_network, reducer
        self._checkpointed = CHECKPOINTED_NETWORK if over_network else CHECKPOINTED
        self._reasons: dict[bool, Reasons] = {}
        self._hidden: dict[bool, dict[str, str]] = {}
        """In training or not → blocks whose tangent would be lost, with the operation that hides it."""
        self._second_tangents: dict[tuple[bool, str], bool] = {}
        """(In training or not, block) → whether all that depends on the block has second-order tangents."""
        self._warned: set[tuple[str, str]] = set()
        self.draws = False
        """Whether a pass of this network draws random numbers."""
        self.can_replay_tape = True
        """Whether a pass can be run again from its tape: it drew nothing, or dropout masks alone and no block needs a second
        pass instead. That would have to draw the same masks, which a CUDA graph cannot."""
        listen(net, self.neurons_removed)

    def primal(self, inputs: Any, target: Any, weight: Weight, observer: LayerObserver | None = None) -> Pass:
        """C alone. It updates buffers."""
        observed = observer is not None or self._reducer.sync_norms
        output = self.run(inputs, Forward(observer=observer, reducer=self._reducer) if observed else None)
        return Pass(self._loss(output, target, weight), output)

    def taped(self, inputs: Any, target: Any, weight: Weight, observer: LayerObserver) -> Pass:
        """C alone, recorded so that `with_curvature` can continue from it. It updates buffers."""
        tape, random = Tape(), None if capturing() else RandomState(*self.net.parameters())
        unread = {id(buffer) for norm in tracked(self.net) for buffer in norm.buffers()}
        buffers = {name: buffer.clone() for name, buffer in self.net.named_buffers() if id(buffer) not in unread}
        mode = Forward(observer=observer, tape=tape, reducer=self._reducer, before=random)
        output = self.run(inputs, mode)
        loss = self._loss(output, target, weight)
        if random is not None:
            self.draws, self.can_replay_tape = not random.unchanged(), mode.drew_only_masks()
            if self.draws and self.can_replay_tape:
                self.can_replay_tape = all(
                    tape.calls_after(block.parameters.values()) is not None for block in self._blocks()
                )
        kept = tape if self.can_replay_tape else None
        return Pass(loss, output, tape=kept, buffers=buffers, random=random, in_cuda_graph=capturing())

    def with_curvature(
        self,
        block: Block | WholeNetwork,
        tangents: ParameterTangents,
        inputs: Any,
        target: Any,
        weight: Weight,
        *,
        observer: LayerObserver | None = None,
        primal: Pass | None = None,
        side_effect_free: bool = False,
        within: contextlib.AbstractContextManager[Any] | None = None,
    ) -> Pass:
        """C and q along v, given as `tangents` of the block's parameters. With `primal`, a taped pass of this batch, only the
        operations after the block run again, where that is possible."""
        self.inspect(inputs)
        make_mode: Callable[[], Mode]
        if self.has_second_tangents(block, tangents, inputs, target):
            undo = None if capturing() or side_effect_free or primal is not None else self._undo()
            try:
                make_mode = partial(
                    SecondTangent, tangents, self._known_curvature(), observer=observer, reducer=self._reducer
                )
                return self._along(make_mode, tangents, inputs, target, weight, primal, side_effect_free, within)
            except InputError as error:
                if capturing() or not isinstance(error.__cause__ or error, UnsupportedOperationError):
                    raise
            # a batch on which the network takes another path than in the trial
            self._second_tangents[self.net.training, block.name] = False
            if observer is not None:
                observer.forget()
            if undo is not None:
                undo()
        make_mode = partial(self._mode, block, tangents, observer)
        return self._along(make_mode, tangents, inputs, target, weight, primal, side_effect_free, within)

    def _along(
        self,
        make_mode: Callable[[], Mode],
        tangents: ParameterTangents,
        inputs: Any,
        target: Any,
        weight: Weight,
        primal: Pass | None,
        side_effect_free: bool,
        within: contextlib.AbstractContextManager[Any] | None,
    ) -> Pass:
        """C and q by the mode's route."""
        continued = None if primal is None else self._continued(primal, make_mode, [p for p, _ in tangents])
        if continued is not None:
            mode, output = continued
        else:
            mode = make_mode()
            if primal is not None and primal.random is not None:
                primal.random.restore()  # the second pass draws the same
            elif primal is not None and self.draws:
                raise RuntimeError("a second pass cannot draw the same random numbers in a CUDA graph")
            before = None if primal is None else primal.buffers
            output = self.run(
                inputs, mode, side_effect_free=side_effect_free or primal is not None, within=within, before=before
            )
        loss = primal.loss if primal is not None and output is primal.output else self._loss(output, target, weight)
        with derivatives_explained(self._checkpointed), autocast_off(loss):
            q = mode.quotient(loss, output, target, weight)
        u = mode.tangent(output) if isinstance(mode, GaussNewton) else None
        return replace(primal or Pass(loss, output), loss=loss, output=output, q=q, tangent=u)

    @staticmethod
    def _continued(primal: Pass, make_mode: Callable[[], Mode], parameters: list[Tensor]) -> tuple[Mode, Any] | None:
        """A pass along v from the tape of a pass without: its mode and output. Tangents are carried beside the values that are
        there; where that cannot be, and for the Hessian by reverse passes, the operations after the parameters run again. None
        where that cannot be either."""
        if primal.tape is None:
            return None
        with contextlib.suppress(UnsupportedOperationError):  # which a second pass raises by its layer
            mode = make_mode()
            if isinstance(mode, Tangent) and primal.tape.tangent(mode, primal.output) is not None:
                return mode, primal.output
        with contextlib.suppress(UnsupportedOperationError):
            mode = make_mode()  # without the tangents of what was tried before
            output = primal.tape.rerun(mode, parameters, primal.output)
            return None if output is None else (mode, output)
        return None

    def run(
        self,
        inputs: Any,
        mode: Forward | None = None,
        *,
        side_effect_free: bool = False,
        within: contextlib.AbstractContextManager[Any] | None = None,
        before: dict[str, Tensor] | None = None,
    ) -> Any:
        """The network's output. With `side_effect_free` it works on copies of the buffers, some as they were `before`."""
        buffers = {name: buffer.clone() for name, buffer in self.net.named_buffers()} if side_effect_free else None
        if buffers is not None and before is not None:
            buffers |= before
        try:
            # a mode sees the operations of compiled functions only if they run eagerly
            with (
                contextlib.nullcontext() if mode is None else compiled_functions_run_eagerly,
                mode or contextlib.nullcontext(),
                within or contextlib.nullcontext(),
            ):
                output = run(self.net, inputs, output=self.output, buffers=buffers)
            if mode is not None and mode.unsupported is not None:
                raise mode.unsupported  # the network's own code has caught it and taken another path
            return output
        except UnsupportedOperationError as error:
            layer = module_that_raised(self.net, error)
            raise InputError(f"{f'layer {layer!r}' if layer else 'net'} {error}") from error
        finally:
            if mode is not None:
                mode.unsupported = None  # they would hold each other

    def _loss(self, output: Any, target: Any, weight: Weight) -> Tensor:
        return weighted(self.loss(output, target), weight)

    def _mode(
        self,
        block: Block | WholeNetwork,
        tangents: ParameterTangents,
        observer: LayerObserver | None,
    ) -> Mode:
        if not self._uses_gauss_newton(block):
            return Hessian(tangents, observer=observer, reducer=self._reducer)
        return GaussNewton(tangents, self._known_curvature(), observer=observer, reducer=self._reducer)

    def _known_curvature(self) -> LossCurvature:
        """Of the loss as it is now: its weights may change during training."""
        found = loss_curvature(self.loss)
        assert found is not None
        return found

    def _undo(self) -> Callable[[], None]:
        """Restores buffers, changed in place or assigned, and random state as they are now."""
        buffers = [
            (module, name, buffer, buffer.clone())
            for module in self.net.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        random = RandomState(*self.net.parameters())

        def undo() -> None:
            random.restore()
            with torch.no_grad():
                for module, name, buffer, before in buffers:
                    module._buffers[name] = buffer.copy_(before)

        return undo

    def has_second_tangents(
        self, block: Block | WholeNetwork, tangents: ParameterTangents, inputs: Any, target: Any
    ) -> bool:
        """Whether q along the block is the Hessian's and second-order tangents give it. A loss that is not PyTorch's may depend
        on the block by itself. A trial pass without side effects tells, once for each block and mode."""
        key = self.net.training, block.name
        if loss_curvature(self.loss) is None or block.name in self._hidden[key[0]] or self._uses_gauss_newton(block):
            return False
        if self._reducer.sync_norms or (capturing() and key not in self._second_tangents):
            return False
        if key not in self._second_tangents:
            curvature = self._known_curvature()
            try:
                with RandomState(*self.net.parameters()):
                    z = self.run(
                        inputs, SecondTangent(tangents, curvature, reducer=self._reducer), side_effect_free=True
                    )
                    curvature.quotient(z, torch.zeros_like(z), target)
                found = True
            except Exception:  # if it is the network's own, the reverse passes raise it too
                found = False
            self._second_tangents[key] = found
        return self._second_tangents[key]

    def _blocks(self) -> Sequence[Block | WholeNetwork]:
        return [WholeNetwork(self.net)] if self._over_network else find_blocks(self.net)

    def inspect(self, inputs: Any) -> None:
        """Where Gauss–Newton and Hessian differ, once in training and once in evaluation mode."""
        if self.net.training in self._reasons:
            return
        blocks = self._blocks()
        mode = Linearity(blocks, reducer=self._reducer)
        with RandomState(*self.net.parameters()):
            output = self.run(inputs, mode, side_effect_free=True)
            reasons = mode.end(output)
        self._check_hidden(output, mode.lost)
        self._reasons[self.net.training], self._hidden[self.net.training] = reasons, mode.lost

    def check_derivatives(self, inputs: Any, target: Any) -> None:
        """That q along any block can be differentiated: v may move to each of them in a run. A trial step along all blocks
        together, without side effects; if that fails, one along each, as some operations support one layer's v alone."""
        self.inspect(inputs)
        blocks, hidden = self._reached(inputs, target), self._hidden[self.net.training]
        followed = [block for block in blocks if not (self._gauss_newton and block.name in hidden)]
        first_hidden = [block for block in blocks if block not in followed][:1]  # what is after it is after the others
        warned = set(self._warned)
        for together in (followed, first_hidden):
            try:
                self._try(together, inputs, target)
            except InputError:
                if self._reducer.sync_norms:  # other ranks may have passed, and would not sum
                    raise
                for block in together:
                    self._try([block], inputs, target)
            finally:
                self._warned = set(warned)  # the step will tell

    def _reached(self, inputs: Any, target: Any) -> list[Block | WholeNetwork]:
        """The blocks that the loss depends on."""
        if self._reducer.sync_norms:  # a pass without their sums would be another one
            return list(self._blocks())
        trained = [p for p in self.net.parameters() if p.requires_grad]
        try:
            with warnings.catch_warnings(action="ignore"), RandomState(*trained), self._loss_state_kept():
                output = self.run(inputs, side_effect_free=True)
                loss = self._loss(output, target, None)
            with without_tensor_hooks(trained):
                gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        except Exception:  # left to the steps
            return list(self._blocks())
        reached = {id(p) for p, gradient in zip(trained, gradients, strict=True) if gradient is not None}
        return [block for block in self._blocks() if any(id(p) in reached for p in block.parameters.values())]

    @contextlib.contextmanager
    def _loss_state_kept(self) -> Iterator[None]:
        """Around trial passes: a loss may have buffers, such as running means."""
        buffers = list(self.loss.buffers()) if isinstance(self.loss, nn.Module) else []
        before = [buffer.clone() for buffer in buffers]
        try:
            yield
        finally:
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)

    def _try(self, blocks: Sequence[Block | WholeNetwork], inputs: Any, target: Any) -> None:
        """InputError if q along these blocks or its gradient cannot be had. Whatever else fails is left to the steps."""
        parameters = {id(p): p for block in blocks for p in block.parameters.values()}
        if not parameters:
            return
        tangents = [(p, torch.zeros_like(p)) for p in parameters.values()]
        block = blocks[0] if len(blocks) == 1 else WholeNetwork(self.net)
        trained = [p for p in self.net.parameters() if p.requires_grad]
        try:
            with warnings.catch_warnings(action="ignore"), RandomState(*trained), self._loss_state_kept():
                q = self.with_curvature(block, tangents, inputs, target, None, side_effect_free=True).q
                assert q is not None
                with derivatives_explained(self._checkpointed), without_tensor_hooks(trained):
                    torch.autograd.grad(q, trained, allow_unused=True)
        except InputError as error:
            if self._over_network or not isinstance(error.__cause__, CheckpointError):
                raise  # else v may stay after the checkpointed part
        except Exception:
            return

    def _check_hidden(self, output: Any, hidden: dict[str, str]) -> None:
        """That hidden operations have a second derivative, which the Hessian along these blocks takes."""
        squares = [x.square().sum() for x in tensors_in(output) if x.requires_grad]  # whose derivative is not constant
        for block in [block for block in find_blocks(self.net) if block.name in hidden]:
            if hidden[block.name] == REENTRANT:
                raise InputError(
                    f"layer {block.name!r} must not be before a reentrant checkpoint, which has no second derivative, got one; "
                    "pass use_reentrant=False to torch.utils.checkpoint, or set mu=0"
                )
            parameters = [p for p in (block.weight, block.bias) if p is not None and p.requires_grad]
            with without_tensor_hooks(parameters):
                gradients = torch.autograd.grad(squares, parameters, create_graph=True, allow_unused=True)
            if lacks_second_derivative(gradients):
                raise InputError(
                    f"layer {block.name!r}: {hidden[block.name]} after it must have a second derivative, got an "
                    "autograd.Function marked @once_differentiable; write its backward in differentiable operations, or set "
                    "mu=0"
                )

    def _uses_gauss_newton(self, block: Block | WholeNetwork) -> bool:
        """Whether q along the block is Gauss–Newton's. Where that was asked for and an operation hides the block's tangent, it
        is the Hessian's: v may move to such a block late in a run, and an error would then lose the run's work."""
        hidden = self._hidden.get(self.net.training, {}).get(block.name)
        if self._over_network and hidden is not None:
            raise InputError(
                f"direction_over must be 'block' for this network, got 'network': Gauss–Newton cannot follow {hidden} (a "
                "custom autograd.Function or scripted code), in which some layer's tangent would be lost"
            )
        if self._gauss_newton and hidden is not None and (block.name, hidden) not in self._warned:
            self._warned.add((block.name, hidden))
            warnings.warn(
                f"layer {block.name!r}: Gauss–Newton cannot follow {hidden} after it (a custom autograd.Function or scripted "
                "code), so its curvature is the Hessian's; curvature='hessian' takes that for all layers",
                stacklevel=2,
            )
        return self._gauss_newton and hidden is None

    @property
    def routes(self) -> dict[str, str]:
        """What q is for each block, in the network's current mode: exact (Gauss–Newton and Hessian agree), or which of the two
        and why they differ."""
        mode = self.net.training
        routes = described(self._reasons.get(mode, {}), "ggn" if self._gauss_newton else "hessian")
        hidden = self._hidden.get(mode, {}) if self._gauss_newton else {}
        return routes | {name: f"hessian, as Gauss–Newton cannot follow {each}" for name, each in hidden.items()}

    def neurons_removed(self, removal: Removal) -> Callable[[], None]:
        return self._forget

    def _forget(self) -> None:
        self._reasons, self._hidden, self._second_tangents = {}, {}, {}
