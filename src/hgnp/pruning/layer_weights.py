"""The weights into a layer's neurons, as the layer computes them.

A layer may add several products, such as x·Wᵀ + s·(x·Aᵀ)·Bᵀ. It is then Σ u·Mᵀ over the tensors u that its products read, and
the weights into its neurons are the rows of all M: here those of W + s·B·A.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from hgnp.pruning.graph import Graph, ValueRef, value_of_weights
from hgnp.pruning.labels import NO_SLOTS, LabelledTensor, add_leading_dims, varying_dims
from hgnp.pruning.propagation import LabelledCall, LabelPropagation
from hgnp.pruning.rules import RESHAPES, op_name

COPIES = ("alias", "detach", "clone", "contiguous", "_to_copy")
VIEWS = ("unsqueeze", "squeeze", *RESHAPES)


class ProductInput(NamedTuple):
    """What a product reads, and how."""

    value: int
    version: int
    """The operator call that last wrote it; −1: none of the layer's."""
    dim: int
    """Where the product has the weight's rows: −1 for x @ w, −2 for w @ x, 1 for a convolution."""
    options: str = ""
    """Those of a convolution."""


Factors = dict[ProductInput, Tensor]
"""A sum of products: source → M, (…, rows, columns); for a convolution (rows, …)."""


def summed_products(
    propagation: LabelPropagation, layer: str, alive: Tensor, tensors: Mapping[str, Tensor], now: Callable[[], Graph]
) -> list[tuple[Tensor, Tensor]]:
    """(weights, slots of their rows): M of every sum of products in a layer's first call that is not part of another; empty if
    the value of some weight is not known.

    `alive` are the slots that remain of those in `propagation`, `tensors` what remains of the network's parameters and buffers,
    and `now` traces the network as it is.
    """
    calls = [call for call in propagation.graph.function_calls if call.module_call.module == layer]
    sums = _ProductSums(propagation, alive, tensors, now)
    for number in [op for call in calls if call.module_call == calls[0].module_call for op in call.op_calls]:
        sums.follow(number)
    result: list[tuple[Tensor, Tensor]] = []
    if not sums.all_known:
        return result
    for factors, rows in [*sums.ended, *sums.current.values()]:
        for source, m in factors.items():
            m = m.movedim(-2, 0) if source.dim < 0 else m
            if len(rows):
                result.append((m.expand(len(rows), *m.shape[1:]), rows))  # a single row may be added to all
    return result


class _ProductSums:
    """Follows sums of products from one operator call to the next."""

    def __init__(
        self, propagation: LabelPropagation, alive: Tensor, tensors: Mapping[str, Tensor], now: Callable[[], Graph]
    ) -> None:
        self._propagation, self._alive, self._tensors, self._now = propagation, alive, tensors, now
        self.current: dict[int, tuple[Factors, Tensor]] = {}
        """Value → the sum that it is, and the slots of its rows."""
        self.ended: list[tuple[Factors, Tensor]] = []
        """Sums that were overwritten, as by an activation in place."""
        self.all_known = True
        """Whether the weights of all products are known."""
        self._original: dict[int, int] = {}
        """Copy or view of features → the value that they are of."""
        self._version: dict[int, int] = {}

    def follow(self, number: int) -> None:
        labelled = self._propagation.calls[number]
        reads, writes = labelled.call.reads, labelled.call.writes
        factors = self._factors(number, labelled)
        rows = self._rows(labelled.writes[0], next(iter(factors)).dim) if factors else None
        if rows is not None:
            for value in reads:
                self.current.pop(value, None)
            self.current[writes[0]] = factors, rows
        else:
            self.ended += [self.current.pop(value) for value in writes if value in self.current]
            if _keeps_last_dim(labelled):
                self._original[writes[0]] = self._original.get(reads[0], reads[0])
        self._version |= dict.fromkeys(writes, number)

    def _rows(self, product: LabelledTensor, dim: int) -> Tensor | None:
        """The remaining slots along the rows of a product; none for a single row."""
        dim %= len(product.shape)
        label = product.along(dim)
        if product.shape[dim] == 1:
            return NO_SLOTS
        if label is None or varying_dims(label) != (dim,):
            return None
        return label.flatten()[self._alive[label.flatten()]]

    def _factors(self, number: int, labelled: LabelledCall) -> Factors:
        """The result of an operator call as a sum of products; empty if it is anything else."""
        args, name = labelled.call.args, op_name(labelled.call.op).removesuffix("_")
        if name in ("convolution", "_convolution"):
            return self._convolution(number, labelled)
        if name in ("mm", "bmm"):
            return self._product(number, labelled, 0)
        if name in ("addmm", "baddbmm", "add", "sub"):
            kwargs, sums = labelled.call.kwargs, name in ("add", "sub")
            other = self._factors_of(args[1]) if sums else self._product(number, labelled, 1)
            alpha = kwargs.get("alpha", 1) * (-1 if name == "sub" else 1)
            return _added(_times(self._factors_of(args[0]), kwargs.get("beta", 1)), _times(other, alpha))
        if name in ("mul", "div") and not labelled.call.kwargs:
            return self._scaled(number, labelled)
        factors = self._factors_of(args[0]) if _keeps_last_dim(labelled) else {}
        return factors if name in COPIES or {source.dim for source in factors} == {-1} else {}

    def _factors_of(self, operand: Any) -> Factors:
        known = isinstance(operand, ValueRef) and operand.index in self.current
        return self.current[operand.index][0] if known else {}

    def _product(self, number: int, labelled: LabelledCall, position: int) -> Factors:
        """A product with a weight. Where its features are such a product, so are their weights: x·Aᵀ·Bᵀ = x·(B·A)ᵀ."""
        left, right = labelled.call.args[position : position + 2]
        on_right = _tensor(labelled, right).is_weight
        dim, features = (-1, left) if on_right else (-2, right)
        matrix = self._weight(number, labelled, position + on_right)
        if matrix is None or _tensor(labelled, features).is_weight:
            return {}
        matrix = matrix.transpose(-1, -2) if on_right else matrix
        while matrix.dim() > 2 and matrix.stride(0) == 0:  # repeated for every sample
            matrix = matrix[0]
        inner = self._factors_of(features)
        if inner and {source.dim for source in inner} == {dim}:
            return {source: matrix @ m for source, m in inner.items()}
        value = self._original.get(features.index, features.index)
        return {ProductInput(value, self._version.get(value, -1), dim): matrix}

    def _convolution(self, number: int, labelled: LabelledCall) -> Factors:
        x, _, _, *options = labelled.call.args
        kernel, rows = self._weight(number, labelled, 1), self._rows(labelled.writes[0], 1)
        if kernel is None or rows is None or _tensor(labelled, x).is_weight:
            return {}
        if options[3]:  # transposed: (inputs, outputs of a group, *kernel)
            groups = max(len(rows) // kernel.shape[1], 1)
            kernel = kernel.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
        return {ProductInput(x.index, self._version.get(x.index, -1), 1, str(options)): kernel}

    def _scaled(self, number: int, labelled: LabelledCall) -> Factors:
        """A sum of products times a number, or times one weight for each of its rows, or divided by it."""
        args, divided = labelled.call.args[:2], op_name(labelled.call.op).startswith("div")
        position = next((k for k, arg in enumerate(args) if self._factors_of(arg)), None)
        if position is None or (divided and position == 1):
            return {}
        factors, scale = self._factors_of(args[position]), args[1 - position]
        if isinstance(scale, ValueRef):
            scale, ndim = self._weight(number, labelled, 1 - position), len(labelled.writes[0].shape)
            dim = next(iter(factors)).dim % ndim
            if scale is None or scale.numel() not in (1, add_leading_dims(scale, ndim).shape[dim]):
                return {}
        return _times(factors, 1 / scale if divided else scale)

    def _weight(self, number: int, labelled: LabelledCall, position: int) -> Tensor | None:
        """The value of an operand that is computed from parameters and buffers alone."""
        operand, graph = labelled.call.args[position], self._propagation.graph
        if not isinstance(operand, ValueRef) or not _tensor(labelled, operand).is_weight:
            return None
        if not _is_parameter(graph, operand.index):
            graph = self._now()
            call = graph.op_calls[number] if number < len(graph.op_calls) else None
            if call is None or call.op is not labelled.call.op:
                self.all_known = False
                return None
            operand = call.args[position]
        value = value_of_weights(graph, operand.index, self._tensors)
        self.all_known &= value is not None
        return None if value is None else value.detach()


def _tensor(labelled: LabelledCall, operand: ValueRef) -> LabelledTensor:
    return labelled.reads[labelled.call.reads.index(operand.index)]


def _keeps_last_dim(labelled: LabelledCall) -> bool:
    """Whether an operator copies a tensor, or reshapes it without its last dimension."""
    name = op_name(labelled.call.op)
    return name in COPIES or (name in VIEWS and labelled.reads[0].shape[-1:] == labelled.writes[0].shape[-1:])


def _times(factors: Factors, scale: Tensor | float) -> Factors:
    """A sum of products times a number, or one for each row."""

    def by_row(source: ProductInput, m: Tensor) -> Tensor | float:
        return scale.reshape(-1, *(1,) * (1 if source.dim < 0 else m.dim() - 1)) if isinstance(scale, Tensor) else scale

    return {source: m * by_row(source, m) for source, m in factors.items()}


def _added(one: Factors, other: Factors) -> Factors:
    """The sum of two sums; a tensor that is none adds no weights."""
    if one and other and {source.dim for source in one} != {source.dim for source in other}:
        return {}
    return one | {source: one[source] + m if source in one else m for source, m in other.items()}


def _is_parameter(graph: Graph, index: int) -> bool:
    """Whether a value is a parameter or buffer, perhaps transposed."""
    producer = {written: call for call in graph.op_calls for written in call.writes}
    while index in producer and op_name(producer[index].op) in ("t", "transpose", "permute", "alias", "detach"):
        index = producer[index].reads[0]
    return graph.values[index].name is not None
