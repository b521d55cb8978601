"""hgnp's errors, and what their messages have in common.

Every error that hgnp raises about what it was given is an `HgnpError`, and also the built-in error that users expect. A message
is one line: what must hold, what was given, what to do.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class HgnpError(Exception):
    """The base class of hgnp's errors."""


class InputError(HgnpError, ValueError):
    """An argument, a file or a network that hgnp cannot work with."""


class InputTypeError(HgnpError, TypeError):
    """An argument of the wrong type."""


class MissingPackageError(HgnpError, ModuleNotFoundError):
    """An optional package that is not installed."""


class DivergedError(HgnpError, ArithmeticError):
    """The loss is no longer a finite number."""


MOST_NAMES = 50
RENAMED = {
    "v_every": "refresh_every",
    "rest_closed": "skip_inactive",
    "multiple": "round_to",
    "engine": "execution",
    "v_from": "direction_from",
    "convention": "kfac_approx",
    "labels": "fisher_type",
}
"""Options under their former names → their names now."""
REMOVED = {
    "norm": "BatchNorm is always differentiated through the batch's statistics, as penalising it in evaluation mode wrecked "
    "training (docs/flatness.md)"
}
"""Options that are no more → why."""


def check_renamed(names: Iterable[object], known: Collection[str], where: str) -> None:
    """Refuses a former name of one of the options that are known here, and an option that is no more."""
    for name in names:
        if name in REMOVED and name not in known:
            raise InputError(f"{where}: {name} was removed: {REMOVED[str(name)]}; omit it")
        if RENAMED.get(str(name)) in known:
            raise InputError(f"{where}: {name} is now called {RENAMED[str(name)]}; rename it")


def refuse_renamed(function: Callable[P, T]) -> Callable[P, T]:
    """A function that names the new option where it is called with a former one."""

    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        check_renamed(kwargs, known, function.__qualname__.removesuffix(".__init__"))
        return function(*args, **kwargs)

    return checked


def meant(name: object, known: Collection[str]) -> str:
    """The end of a message about a name that is not known."""
    close = difflib.get_close_matches(str(name), known)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    more = f" and {len(known) - MOST_NAMES} more" if len(known) > MOST_NAMES else ""
    return f"; there are {', '.join(list(known)[:MOST_NAMES])}{more}"


def named(names: Sequence[str], most: int = 3) -> str:
    """Names in a row, the first few of many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def first_line(error: BaseException) -> str:
    """What an error says first, or its kind if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def one_line(error: BaseException) -> str:
    """All that an error says, for those that break their lines anywhere."""
    return " ".join(str(error).split())


def brief(error: BaseException) -> str:
    """An error's kind and what it says first, in at most 200 characters: for those that were not made to be read."""
    kind, first = type(error).__name__, first_line(error)
    text = kind if first == kind else f"{kind}: {first.strip()}"
    return text if len(text) <= 200 else f"{text[:199]}…"
