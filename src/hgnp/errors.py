"""hgnp's errors, and what their messages have in common.

Every error about an argument, a network or the content of a file is an `HgnpError`, and also the built-in error that users
expect. A file that is missing or cannot be written is an OSError. A message is one line: what must hold, what was given, what
to do.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class HgnpError(Exception):
    """Base class of hgnp's errors.

    >>> import hgnp
    >>> try:
    ...     hgnp.Recipe(keep=2)
    ... except hgnp.HgnpError as error:
    ...     print(error)
    keep must be a fraction > 0 and ≤ 1, got 2
    """


class InputError(HgnpError, ValueError):
    """An argument, a file or a network that hgnp cannot work with."""


class InputTypeError(HgnpError, TypeError):
    """An argument of the wrong type."""


class MissingPackageError(HgnpError, ModuleNotFoundError):
    """An optional package that is not installed."""


class DivergedError(HgnpError, ArithmeticError):
    """The loss is no longer finite: the run diverged and stopped.

    >>> import torch, hgnp
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> train = [(torch.randn(16, 4), torch.arange(16) % 2)] * 4
    >>> try:
    ...     hgnp.prune(net, train, recipe=hgnp.Recipe(keep=0.5, lr=1e30), verbose=False)
    ... except hgnp.DivergedError as error:
    ...     print("diverged")  # such as: retry with a smaller learning rate
    diverged
    """


class RankError(HgnpError, RuntimeError):
    """Another process of a data-parallel run failed, died or does not answer."""


MAX_NAMES = 50
RENAMED = {
    "v_every": "refresh_every",
    "rest_closed": "skip_inactive",
    "multiple": "round_to",
    "engine": "execution",
    "v_from": "direction_from",
    "convention": "kfac_approx",
    "labels": "fisher_type",
}
"""Former name of an option → its name now."""
REMOVED = {
    "norm": "BatchNorm is always differentiated through the batch's statistics, as penalising it in evaluation mode ruined "
    "training (docs/flatness.md)"
}
"""Removed option → why it was removed."""


def check_renamed(names: Iterable[object], known: Collection[str], where: str) -> None:
    """Refuse former names of the `known` options, and removed options."""
    for name in names:
        if name in REMOVED and name not in known:
            raise InputError(f"{where}: {name} was removed: {REMOVED[str(name)]}; omit it")
        if RENAMED.get(str(name)) in known:
            raise InputError(f"{where}: {name} is now called {RENAMED[str(name)]}; rename it")


def refuse_renamed(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to refuse options that it does not have or that are not given by name, and to name the new name or
    the closest one."""

    parameters = inspect.signature(function).parameters
    known = [name for name in parameters if name != "self"]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    by_name = [parameter.name for parameter in parameters.values() if parameter.kind is parameter.KEYWORD_ONLY]
    by_position = len(parameters) - len(by_name) - takes_any
    where = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        check_renamed(kwargs, known, where)
        if len(args) > by_position:
            given = args[by_position]
            shown = repr(given) if isinstance(given, int | float | str) else "…"
            raise InputTypeError(f"{where}: options must be given by name, got one without; use {by_name[0]}={shown}")
        for name in kwargs:
            if name not in known and not takes_any:
                raise InputTypeError(f"{where}: option must be a known one, got {name!r}{did_you_mean(name, known)}")
        return function(*args, **kwargs)

    return checked


def did_you_mean(name: object, known: Collection[str]) -> str:
    """The end of a message about an unknown name: close matches, or the known names."""
    close = difflib.get_close_matches(str(name), known)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    more = f" and {len(known) - MAX_NAMES} more" if len(known) > MAX_NAMES else ""
    return f"; there are {', '.join(list(known)[:MAX_NAMES])}{more}"


def list_names(names: Sequence[str], most: int = 3) -> str:
    """Names, comma-separated; the first `most` of many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_too_few_values(error: BaseException | None) -> bool:
    """Whether a batch norm in training mode got a single value per channel."""
    # PyTorch raises a plain ValueError: there is no class or API to ask. tests/test_errors.py fails if the text changes.
    return isinstance(error, ValueError) and "more than 1 value per channel" in str(error)


def one_line(error: BaseException) -> str:
    """An error's message with its line breaks removed."""
    return " ".join(str(error).split())


def brief(error: BaseException) -> str:
    """An error's class and the first line of its message, in at most 200 characters: for errors of other libraries."""
    kind, first = type(error).__name__, first_line(error)
    text = kind if first == kind else f"{kind}: {first.strip()}"
    return text if len(text) <= 200 else f"{text[:199]}…"
