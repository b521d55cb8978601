"""Record what a network really does, operator by operator, without computing anything.

The network's own forward runs once on fake tensors (shapes without data) while a dispatch mode writes down every ATen
operator. Python code, hooks and parametrisations take part as they would in training; weights, buffers, random state and
the modules' attributes are left as found.
"""

import gc
import logging
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from hgnp.errors import InputTypeError
from hgnp.pruning.as_found import chance, left_as_found
from hgnp.pruning.graph import (
    Graph,
    Inputs,
    Invocation,
    Kind,
    Ref,
    Step,
    Value,
    function_name,
    is_invocation,
    kind_of,
    numbers_of,
    tensors_of,
)
from hgnp.pruning.module_calls import Frame, ModuleCalls
from hgnp.state_guards import layer_of


class UnseenError(Exception):
    """One forward does not show what others would do."""


KNOWN = {outcome: torch.tensor(outcome) for outcome in (False, True)}
MOST_CACHED = 4096
UNSEEN = (UnseenError, DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class _Recorder(TorchDispatchMode):
    def __init__(self, net: nn.Module, weights: Mapping[int, str], inputs: list[Tensor]) -> None:
        super().__init__()
        self.graph = Graph()
        self.calls = ModuleCalls(net, self._entered)
        self._weights = weights
        self._index: dict[int, int] = {}
        self._chances: set[int] = set()
        self._alive: list[Tensor] = []  # keeps id() unique for the length of the recording
        for tensor in inputs:
            self.value(tensor, made=False)

    def _entered(self, frame: Frame, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            with torch._C.DisableTorchFunction():
                self.graph.calls.append((frame.module, self.value(args[0], made=False)))

    def value(self, tensor: Tensor, *, made: bool) -> int:
        index = self._index.get(id(tensor))
        if index is None or self.graph.values[index].shape != tensor.shape:  # some operators reshape in place
            index = self._index[id(tensor)] = len(self.graph.values)
            self._alive.append(tensor)
            shape, named = tuple(int(n) for n in tensor.shape), self._weights.get(id(tensor))
            strided = tensor.layout == torch.strided
            self.graph.values.append(
                Value(
                    shape=shape,
                    repeated=tuple(n > 1 and s == 0 for n, s in zip(shape, tensor.stride(), strict=True))
                    if strided
                    else (False,) * len(shape),
                    storage=tensor.untyped_storage()._cdata if strided else -1 - index,
                    name=named,
                    made=made,
                    constant=None if named else tensor.constant if isinstance(tensor, FakeTensor) else tensor,
                )
            )
        return index

    def _settle_chance(self, op: OpOverload, args: tuple[Any, ...], result: Any) -> None:
        """A layer that is dropped with probability 0 is never dropped: `torch.rand([]) < 0` is known."""
        name = str(op._schema.name).removeprefix("aten::")
        if (name == "rand" and result.dim() == 0) or (name == "detach" and id(args[0]) in self._chances):
            self._chances.add(id(result))
        elif name in ("lt", "le", "gt", "ge") and id(args[0]) in self._chances and isinstance(args[1], int | float):
            outcome = _outcome(name, args[1])
            if outcome is not None and isinstance(result, FakeTensor):
                result.constant = KNOWN[outcome]

    def known(self, tensor: Tensor) -> int | None:
        return self._index.get(id(tensor))

    def made(self) -> list["weakref.ref[Tensor]"]:
        values = zip(self._alive, self.graph.values, strict=True)
        return [weakref.ref(tensor) for tensor, value in values if value.made]

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # only what the network calls itself is an invocation
            return self._dispatch(op, args, kwargs or {})

    def _dispatch(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, _ = tree_flatten((args, kwargs))
        reads = tuple(self.value(leaf, made=False) for leaf in leaves if isinstance(leaf, Tensor))
        if _only_names_a_layout(op, args, kwargs):
            return op(*args, **kwargs)
        shapes_only = op is torch.ops.aten.native_batch_norm.default and isinstance(args[0], FakeTensor)
        result = _batch_norm(*args) if shapes_only else op(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._settle_chance(op, args, result)
        if made:
            refs = tree_map(
                lambda leaf: Ref(self._index[id(leaf)]) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
            )
            writes = tuple(self.value(tensor, made=True) for tensor in made)
            self.graph.steps.append(Step(op, refs[0], refs[1], reads, writes, self.calls.frame.module))
        return result


def _only_names_a_layout(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether all entries stay where they are: pooling to one position gives its result channels-last strides in this way."""
    if op is not torch.ops.aten.as_strided_.default or kwargs or len(args) != 3:
        return False
    tensor, size, stride = args
    same = all(n == 1 or new == old for n, new, old in zip(size, stride, tensor.stride(), strict=False))
    return tuple(size) == tuple(tensor.shape) and same


class _Invocations(TorchFunctionMode):
    """Writes down which steps each call of a torch function comes to."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, graph = function_name(func), self._recorder.graph
        given, numbers = self._known((args, kwargs)), numbers_of(name, args, kwargs)
        start = len(graph.steps)
        try:
            result = func(*args, **kwargs)
        except Exception:
            del graph.steps[start:]  # the network may catch it: half a call is none
            raise
        if is_invocation(name, result):
            steps = range(start, len(graph.steps))
            frame = self._recorder.calls.frame
            new = self._known((args, kwargs))  # a weight is known from its first use
            given = {place: new[place] if index is None else index for place, index in given.items()}
            graph.invocations.append(Invocation(name, frame, given, self._known(result), steps, numbers))
        return result

    def _known(self, tree: Any) -> dict[int, int | None]:
        leaves = enumerate(tree_leaves(tree))
        return {place: self._recorder.known(leaf) for place, leaf in leaves if isinstance(leaf, Tensor)}


def _outcome(comparison: str, threshold: float) -> bool | None:
    """What comparing any number in [0, 1) with the threshold gives, if it is always the same."""
    inclusive = comparison in ("le", "gt")
    if 0 < threshold < 1 or (inclusive and threshold == 0):
        return None
    return (threshold >= 1) == (comparison in ("lt", "le"))


def _batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any
) -> tuple[Tensor, ...]:
    """The shapes of a batch norm. Fake tensors get them from twenty smaller operators, most of the time of a recording."""
    channels = x.shape[1]
    for entry in (weight, bias, mean, var):
        if entry is not None and entry.shape[0] != channels:
            raise RuntimeError(f"a batch norm of {entry.shape[0]} channels is given {channels}")
    return torch.empty_like(x), *(x.new_empty(channels if training else 0) for _ in range(2))


def record(
    net: nn.Module,
    inputs: Inputs,
    *,
    training: bool,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    kinds: Mapping[str, Kind] | None = None,
    adjust: Callable[[], None] = lambda: None,
    read: bool = False,
) -> Graph:
    """The forward of `net` in train or eval mode as a graph.

    `shapes` and `kinds` give parameters and buffers another shape, dtype and device for this one forward and `adjust` sets
    module attributes to match: that is how a removal is tried before anything is touched. With `read`, the inputs and what is
    made of them alone are computed, so that code which looks at them (whether a mask has padding) goes the way it will go.
    """
    with torch.inference_mode(False), _uninterrupted():
        graph, made = _record(net, inputs, training, shapes or {}, kinds or {}, adjust, read)
    if FakeTensorMode.cache_info().size > MOST_CACHED:
        FakeTensorMode.cache_clear()  # PyTorch keeps an entry for each operator and shape, and every removal makes new ones
    if shapes is None and graph.error is None and any(tensor() is not None for tensor in made):
        gc.collect()
        if any(tensor() is not None for tensor in made):
            warnings.warn("a hook or cache outside the network's modules kept tensors of a forward that computed nothing: "
                          "empty it before it is read", stacklevel=2)  # fmt: skip
    return graph


def _record(
    net: nn.Module,
    inputs: Inputs,
    training: bool,
    shapes: Mapping[str, tuple[int, ...]],
    kinds: Mapping[str, Kind],
    adjust: Callable[[], None],
    read: bool,
) -> tuple[Graph, list["weakref.ref[Tensor]"]]:
    """The graph, and references to the tensors made on the way, which ought to be gone by now."""
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes, weights = _fake_weights(net, fake_mode, shapes, kinds)
    args, kwargs = inputs
    if not read:
        args, kwargs = tree_map(lambda leaf: fake_mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, inputs)
    recorder = _Recorder(net, weights, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
    graph = recorder.graph
    with (
        left_as_found(net),
        recorder.calls,
        plain_attention(),
        warnings.catch_warnings(action="ignore"),
    ):
        net.train(training)
        adjust()
        for module in net.modules():
            for own in (module.__dict__["_parameters"], module.__dict__["_buffers"]):
                own.update({key: fakes[id(tensor)] for key, tensor in own.items() if tensor is not None})
        try:
            before = chance()
            # without the mode, what reads no weight is computed: a weight, being fake, brings its mode with it
            fake = nullcontext() if read else fake_mode
            with torch.enable_grad(), fake, recorder, _Invocations(recorder):
                output = net(*args, **kwargs)
            graph.outputs = tuple(recorder.value(tensor, made=False) for tensor in _tensors(output))
            if chance() != before:
                raise UnseenError("it draws from Python's or NumPy's random numbers")
            if not graph.outputs:
                raise InputTypeError(f"its output, a {type(output).__name__}, holds no tensor that can be found")
        except Exception as error:
            graph.error, graph.where = error, layer_of(net, error)
    return graph, recorder.made()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end: in the middle of a fake tensor's operation it makes PyTorch abort the process."""
    before, came = signal.getsignal(signal.SIGINT), []
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    signal.signal(signal.SIGINT, lambda *args: came.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[-1])


@contextmanager
def plain_attention() -> Iterator[None]:
    """Attention in operators that can be followed; and no report of shapes that do not fit, for that is what trials are for."""
    log = logging.getLogger(FakeTensorMode.__module__)
    level, fast = log.level, torch.backends.mha.get_fastpath_enabled()
    log.setLevel(logging.CRITICAL)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        log.setLevel(level)


def quiet_norms(net: nn.Module) -> None:
    """Put batch norms in eval mode: one value a channel cannot be normalised over the batch."""
    for module in net.modules():
        if isinstance(module, _BatchNorm):
            module.training = False


def _fake_weights(
    net: nn.Module, fake_mode: FakeTensorMode, shapes: Mapping[str, tuple[int, ...]], kinds: Mapping[str, Kind]
) -> tuple[dict[int, Tensor], dict[int, str]]:
    """Fake counterparts by the id of the real tensor, and names by the id of the fake one."""
    fakes: dict[int, Tensor] = {}
    weights: dict[int, str] = {}
    for name, tensor in tensors_of(net).items():
        kind = kinds.get(name) or kind_of(tensor)
        shape = shapes.get(name, tuple(tensor.shape))
        if kind == kind_of(tensor) and shape == tensor.shape:
            fake: Tensor = fake_mode.from_tensor(tensor)
        else:
            with fake_mode:
                fake = torch.empty([shape[dim] for dim in kind.order], dtype=kind.dtype, device=kind.device)
                fake = fake.permute([kind.order.index(dim) for dim in range(len(kind.order))])
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, tensor.requires_grad)
        if kind.counter is not None:
            fake.constant = torch.tensor(kind.counter)  # type: ignore[attr-defined]
        fakes[id(tensor)] = fake
        weights[id(fake)] = name
    return fakes, weights


def _tensors(output: Any, depth: int = 8) -> Iterator[Tensor]:
    """The tensors in whatever a network returns: containers of any class, dataclasses, objects with attributes."""
    if isinstance(output, Tensor):
        yield output
    elif depth and not isinstance(output, str | bytes | type | nn.Module):
        inside: list[Any] = []
        if isinstance(output, Mapping):
            inside += output.values()
        elif isinstance(output, Iterable) and isinstance(output, Sized):
            inside += output
        slots = [slot for kind in type(output).__mro__ for slot in getattr(kind, "__slots__", ())]
        inside += [getattr(output, slot) for slot in slots if hasattr(output, slot)]
        inside += getattr(output, "__dict__", {}).values()
        for part in inside:
            yield from _tensors(part, depth - 1)
