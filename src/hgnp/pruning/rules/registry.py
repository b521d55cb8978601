"""The registry of rules by operator name, and helpers for their arguments."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from hgnp.pruning.labels import LabelledTensor, RuleResult

if TYPE_CHECKING:
    from hgnp.pruning.propagation import LabelPropagation as LabelPropagation

Rule = Callable[..., RuleResult | list[RuleResult]]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule. A name without the trailing underscore covers the in-place operator too."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


@cache
def op_name(op: OpOverload) -> str:
    return str(op._schema.name).removeprefix("aten::")


def tensor_arguments(*args: Any) -> list[LabelledTensor]:
    return [leaf for leaf in tree_leaves(args) if isinstance(leaf, LabelledTensor)]


def normalise_dims(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Non-negative dimensions; None means all of them."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return tuple(range(ndim))
    return tuple(d % ndim for d in ([dims] if isinstance(dims, int) else dims)) if ndim else ()
