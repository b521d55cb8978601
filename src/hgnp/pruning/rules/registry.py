"""Operator name → rule."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from hgnp.pruning.labels import Labelled, Result

if TYPE_CHECKING:
    from hgnp.pruning.propagation import Follower as Follower

Rule = Callable[..., Result | list[Result]]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule. A name without the trailing underscore serves the in-place operator too."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def name_of(op: OpOverload) -> str:
    return str(op._schema.name).removeprefix("aten::")


def tensors(*args: Any) -> list[Labelled]:
    return [leaf for leaf in tree_leaves(args) if isinstance(leaf, Labelled)]


def positive(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Dimensions counted from the front; none given means all."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return tuple(range(ndim))
    return tuple(d % ndim for d in ([dims] if isinstance(dims, int) else dims)) if ndim else ()
