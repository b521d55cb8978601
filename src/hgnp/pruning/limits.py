"""Limits on what layers lose: `floor`, `max_removed` and `round_to`, for all layers or by layer name.

A limit is one value for every layer, or a mapping of patterns to values. Patterns are those of `fnmatch`: `*` stands for any
characters, dots included, `?` for one, `[12]` for one of these. The first pattern in order that matches a layer's name sets its
limit; a layer that no pattern matches has the default.
"""

from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from hgnp.errors import InputError, did_you_mean

Number = TypeVar("Number", int, float)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_fraction(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


LIMITS: dict[str, tuple[str, Callable[[Any], bool], Any]] = {
    "floor": ("an integer ≥ 1, as no layer is emptied", _is_count, 1),
    "max_removed": ("a fraction ≥ 0 and ≤ 1", _is_fraction, 1.0),
    "round_to": ("an integer ≥ 1, such as 8", _is_count, 1),
}
"""Limit → what must hold, in words and as a predicate, and the default."""


def check_limit(name: str, given: Any) -> None:
    """InputError unless `given` is a value of this limit, or a mapping of patterns to such values."""
    expected, fits, _ = LIMITS[name]
    if not isinstance(given, Mapping):
        if not fits(given):
            raise InputError(f"{name} must be {expected}, got {given!r}")
        return
    for pattern, value in given.items():
        if not isinstance(pattern, str) or not pattern:
            raise InputError(f"{name} must have layer names or patterns such as 'features.*' as keys, got {pattern!r}")
        if not fits(value):
            raise InputError(f"{name}[{pattern!r}] must be {expected}, got {value!r}")


def limit_by_layer(name: str, given: Number | Mapping[str, Number], layers: Collection[str]) -> dict[str, Number]:
    """The limit of each layer, validated. A pattern that matches no layer is refused."""
    check_limit(name, given)
    if not isinstance(given, Mapping):
        return dict.fromkeys(layers, given)
    for pattern in given:
        if not any(fnmatchcase(layer, pattern) for layer in layers):
            raise InputError(f"{name}: pattern must match a layer, got {pattern!r}{did_you_mean(pattern, layers)}")
    default = LIMITS[name][2]
    return {
        layer: next((value for pattern, value in given.items() if fnmatchcase(layer, pattern)), default)
        for layer in layers
    }


def values_of(given: Number | Mapping[str, Number]) -> tuple[Number, ...]:
    """The values that a limit has, whichever the layers."""
    return tuple(given.values()) if isinstance(given, Mapping) else (given,)
