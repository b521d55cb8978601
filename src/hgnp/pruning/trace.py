"""Tracing: records a network's forward pass, operator by operator, without computing anything.

The network's own forward runs once on fake tensors (shapes without data) while a dispatch mode records every ATen operator.
Python code, hooks and parametrisations run as they would in training; weights, buffers, random number generators and the
modules' attributes are restored.

Code may read values. Those of parameters, buffers and other tensors that no operator has written are known: they are used, and
noted in `Graph.read_values`. At any other value (a threshold, non-maximum suppression) tracing stops: `Graph.stop` has
which tensors the code still held there.
"""

import copy
import gc
import logging
import math
import os
import signal
import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

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
from torch.jit._fuser import optimized_execution
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from hgnp.errors import InputTypeError
from hgnp.pruning.graph import (
    ABSENT,
    FunctionCall,
    Graph,
    Inputs,
    OpCall,
    Outputs,
    ReadValue,
    Stop,
    TensorSpec,
    Value,
    ValueRef,
    dim_order,
    function_name,
    leaves_of,
    map_leaves,
    non_tensor_arguments,
    run_operator,
    spec_of,
    tensors_of,
)
from hgnp.pruning.liveness import in_use
from hgnp.pruning.module_calls import ModuleCall, ModuleCallTracker
from hgnp.state_guards import (
    compiled_functions_run_eagerly,
    garbage_collection_off,
    module_that_raised,
    preserve_state,
    python_rng_state,
)


class UntraceableError(Exception):
    """One traced forward pass does not determine the others."""


MAX_CACHED_SHAPES = 4096
UNTRACEABLE = (
    UntraceableError,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
_BOOLEAN_OPS: Mapping[str, Callable[[Sequence[bool | None]], bool]] = {
    "any": any, "logical_or": any, "bitwise_or": any, "all": all, "logical_and": all, "bitwise_and": all,
    "logical_not": lambda parts: not parts[0], "bitwise_not": lambda parts: not parts[0],
}  # fmt: skip
"""Operators on truth values that are the same everywhere."""
_ONE_DTYPE = frozenset(getattr(torch.ops.aten, n).default for n in ("mm", "addmm", "bmm", "baddbmm"))
"""Operators that fail on tensors of different dtypes, except on fake ones."""
_FRESH = frozenset(
    [torch.ops.aten.add.Tensor] + [getattr(torch.ops.aten, n).default for n in ("convolution", "relu", "gelu", "silu")]
)
"""Frequent operators that create one tensor, whose shape, strides and dtype those of their arguments and numbers give."""
_FRESH_RESULTS: dict[Any, Any] = {}
"""The metadata of such an operator's arguments → that of its result, from trace to trace."""
_BOOLEANS = {outcome: torch.tensor(outcome) for outcome in (False, True)}


class _OperatorProperties(NamedTuple):
    """Properties of an operator, from its schema and tags."""

    name: str
    draws: bool
    pointwise_in_place: bool
    written: tuple[str, ...]
    """The arguments that it writes."""


@cache
def _properties(op: OpOverload) -> _OperatorProperties:
    name = str(op._schema.name).removeprefix("aten::")
    return _OperatorProperties(
        name,
        torch.Tag.nondeterministic_seeded in op.tags,
        torch.Tag.pointwise in op.tags and name.endswith("_"),
        tuple(each.name for each in op._schema.arguments if each.alias_info is not None and each.alias_info.is_write),
    )


class _OperatorTracer(TorchDispatchMode):
    """Records every ATen operator call and the tensors that it reads and writes."""

    def __init__(
        self,
        net: nn.Module,
        weights: Mapping[int, str],
        real: Mapping[str, Tensor],
        inputs: Mapping[int, tuple[Tensor, Tensor]],
        decisions: "Decisions",
    ) -> None:
        """`weights`: the names of the fake parameters and buffers, by id; `real`: the values to read for them; `inputs`: each
        input with its data."""
        super().__init__()
        self.graph = Graph()
        self.module_calls = ModuleCallTracker(net, self._on_module_call)
        self._weights = weights
        self._index: dict[int, int] = {}
        self._uniform_samples: set[int] = set()
        self._references: list[Tensor] = []  # keeps id() unique for the duration of the trace
        self._real = dict(real)
        self._calls: list[OpCall] = []
        self._origin: dict[int, frozenset[str] | None] = {}
        """Value → what it was computed from beside constants, "weight" or "input" or both; None if it is random or unknown."""
        self._producer: dict[int, int] = {}
        """Value → the call that computed it, among `_calls`: those that failed halfway are there too."""
        self._written: set[int] = set()
        self._unreturned: dict[int, str] = {}
        """Storage that an operator has written without returning it → the operator."""
        self._inputs = {self.value(tensor, computed=False): data for tensor, data in inputs.values()}
        self._origin |= dict.fromkeys(self._inputs, frozenset({"input"}))
        self._decisions, self._places = decisions, dict[str, None]()
        self._uniform: dict[int, tuple[float, float]] = {}

    def _on_module_call(self, call: ModuleCall, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            with torch._C.DisableTorchFunction():
                self.graph.module_inputs.append((call.module, self.value(args[0], computed=False)))

    def value(self, tensor: Tensor, *, computed: bool) -> int:
        """The index of a tensor's value, which is added if it is new."""
        index = self._index.get(id(tensor))
        if index is None or self.graph.values[index].shape != tensor.shape:  # some operators reshape in place
            if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                raise UntraceableError("it calls transforms of torch.func, such as vmap")
            index = self._index[id(tensor)] = len(self.graph.values)
            self._references.append(tensor)
            shape, named = tuple(int(n) for n in tensor.shape), self._weights.get(id(tensor))
            strided = tensor.layout == torch.strided
            self.graph.values.append(
                Value(
                    shape=shape,
                    expanded=tuple(n > 1 and s == 0 for n, s in zip(shape, tensor.stride(), strict=True))
                    if strided
                    else (False,) * len(shape),
                    storage=tensor.untyped_storage()._cdata if strided else -1 - index,
                    name=named,
                    computed=computed,
                    constant=None if named else tensor.constant if isinstance(tensor, FakeTensor) else tensor,
                )
            )
            constant = not computed and not isinstance(tensor, FakeTensor)
            self._origin[index] = frozenset({"weight"}) if named else frozenset() if constant else None
        return index

    def _evaluate_sure_comparison(self, op: OpOverload, args: tuple[Any, ...], result: Any) -> None:
        """A layer that is dropped with probability 0 is never dropped: the value of `torch.rand([]) < 0` is known."""
        name = _properties(op).name
        if (name == "rand" and result.dim() == 0) or (name == "detach" and id(args[0]) in self._uniform_samples):
            self._uniform_samples.add(id(result))
        elif (
            name in ("lt", "le", "gt", "ge")
            and id(args[0]) in self._uniform_samples
            and isinstance(args[1], int | float)
        ):
            outcome = _outcome(name, args[1])
            if outcome is not None and isinstance(result, FakeTensor):
                result.constant = _BOOLEANS[outcome]

    def index_of(self, tensor: Tensor) -> int | None:
        """The index of a tensor's value; None if no operator has read it, unless it is a weight, which `w.to(w.dtype)` returns
        without an operator."""
        return self.value(tensor, computed=False) if id(tensor) in self._weights else self._index.get(id(tensor))

    def computed(self) -> list["weakref.ref[Tensor]"]:
        """References to the tensors that operators have returned."""
        values = zip(self._references, self.graph.values, strict=True)
        return [weakref.ref(tensor) for tensor, value in values if value.computed]

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if op is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two thirds of all calls
        with torch._C.DisableTorchFunction():  # function calls are those of the network's own code
            return self._dispatch(op, args, kwargs or {})

    def _dispatch(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reads = tuple(
            self.value(leaf, computed=False) for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)
        )
        if _only_changes_strides(op, args, kwargs):
            return op(*args, **kwargs)
        for index in reads if self._unreturned else ():
            if (name := self._unreturned.get(self.graph.values[index].storage)) is not None:
                raise UntraceableError(f"it changes tensors without returning them ({name})")
        if op in _ONE_DTYPE:
            dtypes = dict.fromkeys(str(leaf.dtype) for leaf in leaves_of(args) if isinstance(leaf, Tensor))
            if len(dtypes) > 1:
                raise RuntimeError(f"inputs and weights must have the same dtype, got {' and '.join(dtypes)}")
        try:
            result = _known_result_shapes(op, args, kwargs)
            if result is None:
                result = _fresh_result(op, args) if op in _FRESH and not kwargs else op(*args, **kwargs)
        except UNTRACEABLE:
            refs = self._with_refs(args, kwargs)
            with _disable_current_modes(), torch.no_grad():
                values = self._known_result(op, *refs, reads)
                if values is None and op is torch.ops.aten._local_scalar_dense.default:
                    values = self._if_finite(reads[0])
                    if values is not None:
                        stop = Stop(frozenset(), op, self.module_calls.current.module)
                        self.graph.assumed_finite[place_in_code()] = stop
                if values is None:
                    values = self._decided(op, reads)
            if values is None:
                self.graph.stop = Stop(self._held() | set(reads), op, self.module_calls.current.module)
                raise
            result = tree_map(lambda leaf: _as_fake(leaf, args) if isinstance(leaf, Tensor) else leaf, values)
        computed = [leaf for leaf in leaves_of(result) if isinstance(leaf, Tensor)]
        self._evaluate_sure_comparison(op, args, result)
        if computed:
            refs = self._with_refs(args, kwargs)
            writes = tuple(self.value(tensor, computed=True) for tensor in computed)
            module = self.module_calls.current.module
            origins = [self._origin[index] for index in reads]
            random = None in origins or _properties(op).draws
            for index in writes:
                self._origin[index] = None if random else frozenset(each for origin in origins for each in origin or ())
                if index in reads:
                    self._written.add(self.graph.values[index].storage)
                if op is torch.ops.aten.uniform_.default:
                    bounds = [*args[1:], *(0.0, 1.0)[len(args) - 1 :]]
                    self._uniform[index] = bounds[0], bounds[1]
                self._producer[index] = len(self._calls)
            self._calls.append(OpCall(op, refs[0], refs[1], reads, writes, module))
            self.graph.op_calls.append(self._calls[-1])
        changed = {self._index[id(tensor)] for tensor in _written(op, args, kwargs) if id(tensor) not in self._weights}
        if changed and not computed:
            raise UntraceableError(f"it changes tensors without returning them ({op._schema.name})")
        unseen = changed.difference(writes if computed else ())  # nn.RReLU's noise, which nothing reads
        self._unreturned |= {self.graph.values[index].storage: op._schema.name for index in unseen}
        return result

    def is_weight(self, tensor: Any) -> bool:
        """Whether it is a parameter or a buffer."""
        return id(tensor) in self._weights

    def _with_refs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        refs: tuple[Any, Any] = map_leaves(
            lambda leaf: ValueRef(self._index[id(leaf)]) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        return refs

    # Values that the code reads

    def _known_result(self, op: OpOverload, args: Any, kwargs: Any, reads: tuple[int, ...]) -> Any:
        """What the operator returns, if all that it reads is known; else None. Notes the tensors that it depends on."""
        found: dict[int, Tensor] = {}
        sources: set[int] = set()
        if not all(self._evaluate(index, found, sources) for index in reads):
            return None
        module = self.module_calls.current.module
        for index in sources:
            name = self.graph.values[index].name
            read = ReadValue(found[index].detach().clone(), module, found[index] if name is None else None)
            self.graph.read_values.setdefault(name or f"a constant of {module} ({index})", read)
        return run_operator(op, args, kwargs, found)

    def _if_finite(self, index: int) -> bool | None:
        """The truth of a check for infinite and undefined values where there are none; None for anything else."""
        if index in self.graph.finite_checks:
            return self.graph.finite_checks[index]
        if index not in self._producer:
            return None
        call = self._calls[self._producer[index]]
        combine = _BOOLEAN_OPS.get(_properties(call.op).name)
        parts = [self._if_finite(read) for read in call.reads] if combine else [None]
        return None if combine is None or None in parts else combine(parts)

    def _decided(self, op: OpOverload, reads: tuple[int, ...]) -> Any:
        """One of the two outcomes of a decision by the inputs or by a random number, or None where there are more."""
        scalar, index = op is torch.ops.aten._local_scalar_dense.default, reads[0] if reads else -1
        place, found = place_in_code(), dict[int, Tensor]()
        if scalar and index in self._uniform:
            low, high = self._uniform[index]
            outcomes: tuple[Any, Any] = low, math.nextafter(high, low)
        elif not all(self._evaluate(read, found, set(), inputs=True) for read in reads):
            return None
        elif self._decisions.other in self._places:  # after the other outcome: the inputs no longer decide
            if op is torch.ops.aten.nonzero.default:
                return torch.zeros(1, found[index].dim(), dtype=torch.long)
            return found[index].new_zeros(()).item() if scalar else None
        elif scalar and found[index].dtype == torch.bool:
            outcomes = bool(found[index]), not bool(found[index])
        else:
            return None
        if place in self._decisions.undecidable:
            return None
        self._places[place] = None
        self.graph.decisions = tuple(self._places)
        return outcomes[place == self._decisions.other]

    def _evaluate(self, index: int, found: dict[int, Tensor], sources: set[int], *, inputs: bool = False) -> bool:
        """Whether a value depends on parameters, buffers and constants alone (or on inputs and constants), which no operator
        has written; then it is added to `found`, and those that it depends on to `sources`."""
        allowed = {"input"} if inputs else {"weight"}
        needed, pending = set[int](), [index]
        while pending:
            current = pending.pop()
            if current in found or current in needed:
                continue
            origin, value = self._origin[current], self.graph.values[current]
            if origin is None or not origin <= allowed or value.storage in self._written:
                return False
            needed.add(current)
            if current in self._producer:
                pending += self._calls[self._producer[current]].reads
                continue
            data = self._inputs.get(current) if value.name is None else self._real[value.name]
            found[current] = data if data is not None else value.constant  # type: ignore[assignment]
            if found[current].shape != value.shape:  # of a cut that has changed it
                return False
            if current not in self._inputs:
                sources.add(current)
        for number in sorted({self._producer[each] for each in needed if each in self._producer}):
            call = self._calls[number]
            results = tree_leaves(run_operator(call.op, call.args, call.kwargs, found))
            found |= zip(call.writes, [leaf for leaf in results if isinstance(leaf, Tensor)], strict=True)
        return True

    def _held(self) -> frozenset[int]:
        """The values that code may still use."""
        return frozenset(self._index[id(tensor)] for tensor in in_use(self._references, _runs_an_operator))


class Decisions(NamedTuple):
    """What to do where the code reads a truth value of the inputs (is a box degenerate?) or a random number: take the example's
    own outcome, the other one at the place `other`, or none at the `undecidable` places, where tracing stops."""

    other: str = ""
    undecidable: frozenset[str] = frozenset()


def place_in_code() -> str:
    """The line of code, outside of PyTorch and hgnp, that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parent}{os.sep}")


def _runs_an_operator(frame: FrameType) -> bool:
    """Whether a frame is PyTorch's or the tracer's own: its local variables may be arguments of an operator in C++."""
    return frame.f_code.co_filename.startswith(_LIBRARIES)


def _as_fake(tensor: Tensor, args: Any) -> Tensor:
    mode = next((leaf.fake_mode for leaf in tree_leaves(args) if isinstance(leaf, FakeTensor)), None)
    return tensor if mode is None else mode.from_tensor(tensor)


def _as_zeros(leaf: Any) -> Any:
    """A fake tensor as a real one of its shape, which takes no memory: fake ones end with their trace."""
    if not isinstance(leaf, FakeTensor):
        return leaf
    return torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)


_CONTAINERS = (dict, OrderedDict, list)
_MODULE_STATE = frozenset(nn.Module().__dict__)
"""Attributes of every module, `training` and the parameters among them."""


def _same(value: Any, before: Any) -> bool:
    """Whether an attribute is the same object as before or, as a container, holds the same objects."""
    if type(value) not in _CONTAINERS or type(value) is not type(before):
        return value is before
    now, then = ([*each, *each.values()] if isinstance(each, dict) else each for each in (value, before))
    return len(now) == len(then) and all(one is other for one, other in zip(now, then, strict=True))


def _written(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operator writes, by its schema."""
    if not (names := _properties(op).written):
        return []
    given = dict(zip((each.name for each in op._schema.arguments), args, strict=False)) | kwargs
    return [leaf for name in names for leaf in leaves_of(given.get(name)) if isinstance(leaf, Tensor)]


def _only_changes_strides(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether all entries keep their positions: pooling to one position gives its result channels-last strides in this way."""
    if op is not torch.ops.aten.as_strided_.default or kwargs or len(args) != 3:
        return False
    tensor, size, stride = args
    same = all(n == 1 or new == old for n, new, old in zip(size, stride, tensor.stride(), strict=False))
    return tuple(size) == tuple(tensor.shape) and same


class _FunctionTracer(TorchFunctionMode):
    """Records the torch functions that the network's own code calls, with the operator calls that each of them runs."""

    def __init__(self, operators: _OperatorTracer) -> None:
        super().__init__()
        self._operators = operators

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, graph = function_name(func), self._operators.graph
        if func == torch.Tensor.data.__set__ and not self._operators.is_weight(args[0]):  # type: ignore[attr-defined]
            raise UntraceableError("it replaces the data of a tensor")
        leaves = leaves_of((args, kwargs))
        arguments, start = self._indices(leaves), len(graph.op_calls)
        try:
            result = func(*args, **kwargs)
        except Exception:
            del graph.op_calls[start:]  # the network may catch it: a call that failed halfway does not count
            raise
        results = self._indices(leaves_of(result))
        if results or name == "__setitem__":  # other functions only query a tensor
            op_calls = range(start, len(graph.op_calls))
            call = self._operators.module_calls.current
            if None in arguments.values():  # an input has an index from its first use on
                arguments = self._indices(leaves) | {k: index for k, index in arguments.items() if index is not None}
            non_tensors = non_tensor_arguments(name, args, kwargs)
            graph.function_calls.append(FunctionCall(name, call, arguments, results, op_calls, non_tensors))
            if name in ("isfinite", "isinf", "isnan"):
                graph.finite_checks |= {index: name == "isfinite" for index in results.values() if index is not None}
        return result

    def _indices(self, leaves: list[Any]) -> dict[int, int | None]:
        places = enumerate(leaves)
        return {position: self._operators.index_of(leaf) for position, leaf in places if isinstance(leaf, Tensor)}


def _outcome(comparison: str, threshold: float) -> bool | None:
    """The result of comparing a number in [0, 1) with the threshold, if it is the same for all of them."""
    inclusive = comparison in ("le", "gt")
    if 0 < threshold < 1 or (inclusive and threshold == 0):
        return None
    return (threshold >= 1) == (comparison in ("lt", "le"))


def _known_result_shapes(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What frequent operators return, on which fake tensors spend half of the time of a trace; None for others."""
    x = args[0] if args else None
    if not isinstance(x, FakeTensor):
        return None
    if op is torch.ops.aten.native_batch_norm.default:
        return _batch_norm(*args)
    if op is torch.ops.aten.addmm.default and not kwargs:
        return _addmm(*args)
    if op is torch.ops.aten.add_.Tensor and x.constant is not None and type(args[1]) is int:
        with torch._C._DisableTorchDispatch():
            x.constant = x.constant + args[1]  # a norm counts its batches
        return x
    in_place = _properties(op).pointwise_in_place and x.constant is None
    return x if in_place and not any(isinstance(leaf, Tensor) for leaf in leaves_of((args[1:], kwargs))) else None


def _batch_norm(
    x: FakeTensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any
) -> tuple[Tensor, ...]:
    channels = x.shape[1]
    for entry in (weight, bias, mean, var):
        if entry is not None and entry.shape[0] != channels:
            raise RuntimeError(f"the input of a batch norm must have {entry.shape[0]} channels, got {channels}")
    size = (channels if training else 0,)
    if not (x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))):
        return torch.empty_like(x), x.new_empty(size), x.new_empty(size)
    shapes = [(tuple(x.shape), x.stride()), (size, (1,)), (size, (1,))]
    return tuple(_new_fake(x.fake_mode, shape, stride, x.dtype, x.fake_device) for shape, stride in shapes)


def _addmm(bias: Any, a: Any, b: Any) -> Tensor | None:
    """None for shapes and devices that PyTorch broadcasts or refuses. All have one dtype."""
    if not all(isinstance(each, FakeTensor) and each.fake_device == bias.fake_device for each in (a, b)):
        return None
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or bias.shape != b.shape[1:]:
        return None
    shape = a.shape[0], b.shape[1]
    return _new_fake(bias.fake_mode, shape, (max(shape[1], 1), 1), bias.dtype, bias.fake_device)


def _fresh_result(op: OpOverload, args: tuple[Any, ...]) -> Any:
    """What an operator of `_FRESH` returns. PyTorch remembers it too, but takes four times as long to look it up."""
    key = op, *map(_metadata, args)
    known = _FRESH_RESULTS.get(key) if None not in key else None
    if known is not None:
        return _new_fake(args[0].fake_mode, *known)
    result = op(*args)
    if None not in key:
        _FRESH_RESULTS[key] = _metadata(result)
    return result


def _metadata(leaf: Any) -> Any:
    """All that the results of an operator depend on, hashable; None for a tensor with other properties than these."""
    if not isinstance(leaf, Tensor):
        return tuple(leaf) if isinstance(leaf, list) else "None" if leaf is None else leaf
    if not isinstance(leaf, FakeTensor) or leaf.layout != torch.strided or leaf.constant is not None:
        return None
    # a Python number, wrapped in a tensor, has no say in the result's dtype, and looks as any other
    if not leaf.is_floating_point() or leaf.dim() == 0:
        return None
    return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.fake_device


def _new_fake(
    mode: FakeTensorMode, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> FakeTensor:
    with torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return FakeTensor(mode, meta, device)


def trace_forward(
    net: nn.Module,
    inputs: Inputs,
    *,
    training: bool,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    specs: Mapping[str, TensorSpec] | None = None,
    adjust: Callable[[], None] = lambda: None,
    outputs: Outputs | None = None,
    decisions: Decisions = Decisions(),  # noqa: B008
    compute_inputs: bool = False,
) -> Graph:
    """The forward pass of `net` in training or evaluation mode as a graph.

    `shapes` and `specs` give parameters and buffers another shape, dtype and device for this one pass and `adjust` sets module
    attributes to match: this is how a cut is tried before any tensor changes. With `compute_inputs`, the inputs and what is
    computed from them alone have data, so that code which reads them (whether a mask has padding) takes its real path.
    `outputs` says which of the returned tensors count, or replaces the network's forward.
    """
    # most objects of a trace end with it: looking at them meanwhile takes a tenth of its time
    with torch.inference_mode(False), _defer_interrupts(), garbage_collection_off():
        graph, computed = _trace(
            net, inputs, training, shapes or {}, specs or {}, adjust, outputs, decisions, compute_inputs
        )
    if FakeTensorMode.cache_info().size > MAX_CACHED_SHAPES:
        FakeTensorMode.cache_clear()  # PyTorch keeps an entry per operator and shape, and every removal adds new ones
    if len(_FRESH_RESULTS) > MAX_CACHED_SHAPES:
        _FRESH_RESULTS.clear()
    if shapes is None and graph.error is None and any(tensor() is not None for tensor in computed):
        gc.collect()
        if any(tensor() is not None for tensor in computed):
            warnings.warn("a hook or cache outside the network's modules kept fake tensors of the traced forward pass; clear "
                          "it before reading it", stacklevel=2)  # fmt: skip
    return graph


def _trace(
    net: nn.Module,
    inputs: Inputs,
    training: bool,
    shapes: Mapping[str, tuple[int, ...]],
    specs: Mapping[str, TensorSpec],
    adjust: Callable[[], None],
    outputs: Outputs | None,
    decisions: Decisions,
    compute_inputs: bool,
) -> tuple[Graph, list["weakref.ref[Tensor]"]]:
    """The graph, and references to the tensors that were computed, which should be freed by now."""
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    tensors = tensors_of(net)
    fakes, weights = _fake_weights(tensors, fake_mode, shapes, specs)
    args, kwargs = inputs
    if not compute_inputs:
        args, kwargs = tree_map(lambda leaf: fake_mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, inputs)
    pairs = zip(tree_leaves((args, kwargs)), tree_leaves(inputs), strict=True)
    given = {id(leaf): (leaf, data) for leaf, data in pairs if isinstance(leaf, Tensor)}
    tracer = _OperatorTracer(net, weights, tensors, given, decisions)
    graph = tracer.graph
    with (
        preserve_state(net),
        tracer.module_calls,
        visible_operators(),
        warnings.catch_warnings(action="ignore"),
    ):
        net.train(training)
        adjust()
        for module in net.modules():
            for own in (module.__dict__["_parameters"], module.__dict__["_buffers"]):
                own.update({key: fakes[id(tensor)] for key, tensor in own.items() if tensor is not None})
        if outputs is not None and outputs.replaces_forward:
            net.__dict__["forward"] = partial(outputs.function, *(() if outputs.is_method else (net,)))
        attributes = {
            name: {
                key: copy.copy(value) if type(value) in _CONTAINERS else value
                for key, value in module.__dict__.items()
                if key not in _MODULE_STATE
            }
            for name, module in net.named_modules()
        }
        hooks = {name: set(module._forward_hooks) for name, module in net.named_modules()}
        before = python_rng_state()
        try:
            # without the mode, operators that read no weight compute data; a weight is fake and brings its mode with it
            fake = nullcontext() if compute_inputs else fake_mode
            with torch.enable_grad(), fake, tracer, _FunctionTracer(tracer):
                output = net(*args, **kwargs)
            returned = [tracer.value(tensor, computed=False) for tensor in tensors_in_output(output)]
            if outputs is not None and not outputs.replaces_forward:
                with torch.enable_grad(), fake, tracer:
                    output = outputs.function(output)
            graph.outputs = tuple(tracer.value(tensor, computed=False) for tensor in tensors_in_output(output))
            graph.left_out = tuple(index for index in returned if index not in graph.outputs)
            if graph.stop is not None:
                graph.stop = None
                raise UntraceableError("it catches the error of an operator whose data is not known")
            if not graph.outputs:
                raise InputTypeError(f"the network must return tensors, got {type(output).__name__}")
        except Exception as error:
            graph.error, graph.error_module = error, module_that_raised(net, error)
        if python_rng_state() != before and (graph.error is None or isinstance(graph.error, UNTRACEABLE)):
            graph.error, graph.stop = UntraceableError("it uses Python's or NumPy's random numbers"), None
        for name, module in net.named_modules():
            own = {key: value for key, value in module.__dict__.items() if key not in _MODULE_STATE}
            changed = {key: value for key, value in own.items() if not _same(value, attributes[name].get(key, ABSENT))}
            graph.written[name] = {key: tree_map(_as_zeros, value) for key, value in changed.items()}
            graph.overwritten[name] = {key: attributes[name].get(key, ABSENT) for key in changed}
            registered = module._forward_hooks.items()
            if new := [hook_code(hook) for key, hook in registered if key not in hooks[name]]:
                graph.hooked[name] = new
    return graph, tracer.computed()


def hook_code(hook: Callable[..., Any]) -> Any:
    """What tells a hook from others when the code that registers it runs again."""
    return getattr(getattr(hook, "func", hook), "__code__", type(hook))


@contextmanager
def _defer_interrupts() -> Iterator[None]:
    """Delays Ctrl-C to the end of the block: inside an operator on fake tensors it makes PyTorch abort the process."""
    before, received = signal.getsignal(signal.SIGINT), []
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    signal.signal(signal.SIGINT, lambda *args: received.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            before(*received[-1])


@contextmanager
def visible_operators() -> Iterator[None]:
    """Attention as plain ATen operators, which have rules; compiled and scripted functions run operator by operator; autocast
    around the block is off, so that traces within it and outside are equal; and no log of shape errors, which traces of cuts
    may cause."""
    log = logging.getLogger(FakeTensorMode.__module__)
    disabled, fast = log.disabled, torch.backends.mha.get_fastpath_enabled()
    log.disabled = True  # to set its level would clear what all loggers know of theirs
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            sdpa_kernel(SDPBackend.MATH),
            compiled_functions_run_eagerly,
            optimized_execution(False),
            ExitStack() as off,
        ):
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    off.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        log.disabled = disabled


def _fake_weights(
    tensors: Mapping[str, Tensor],
    fake_mode: FakeTensorMode,
    shapes: Mapping[str, tuple[int, ...]],
    specs: Mapping[str, TensorSpec],
) -> tuple[dict[int, Tensor], dict[int, str]]:
    """Fake counterparts by the id of the real tensor, and names by the id of the fake one."""
    fakes: dict[int, Tensor] = {}
    weights: dict[int, str] = {}
    for name, tensor in tensors.items():
        spec = specs.get(name) or spec_of(tensor)
        shape = shapes.get(name, tuple(tensor.shape))
        if len(spec.dim_order) != len(shape):  # a buffer that the code has replaced since
            spec = spec._replace(dim_order=tuple(range(len(shape))))
        alike = shape == tensor.shape and spec[:3] == (tensor.dtype, tensor.device, dim_order(tensor))
        strides = tensor.stride() if alike else _strides(shape, spec.dim_order)
        fake = _new_fake(fake_mode, shape, strides, spec.dtype, spec.device)  # FakeTensorMode.from_tensor is slow
        fake.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            fake._is_param = True
        if spec.counter is not None:
            fake.constant = torch.tensor(spec.counter, device=spec.device)
        fakes[id(tensor)] = fake
        weights[id(fake)] = name
    return fakes, weights


def _strides(shape: tuple[int, ...], dim_order: tuple[int, ...]) -> list[int]:
    """Those of a dense tensor with its dimensions in this order in memory."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(dim_order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return strides


def tensors_in_output(output: Any, depth: int = 8) -> Iterator[Tensor]:
    """The tensors in a network's output: in containers of any class, dataclasses, objects with attributes."""
    if isinstance(output, Tensor):
        yield output
    elif depth and not isinstance(output, str | bytes | type | nn.Module):
        inside: list[Any] = []
        if isinstance(output, Mapping):
            inside += output.values()
        elif isinstance(output, Iterable) and isinstance(output, Sized):
            inside += output
        slots = [slot for base in type(output).__mro__ for slot in getattr(base, "__slots__", ())]
        inside += [getattr(output, slot) for slot in slots if hasattr(output, slot)]
        inside += getattr(output, "__dict__", {}).values()
        for part in inside:
            yield from tensors_in_output(part, depth - 1)
