"""hgnp's errors: their base class, the form of their messages, and which built-in errors the sources raise."""

import ast
import builtins
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import hgnp
from hgnp import errors
from hgnp.errors import REMOVED, RENAMED, brief, did_you_mean, first_line, is_too_few_values, one_line


def test_a_name_that_is_close_is_offered_and_otherwise_those_that_there_are() -> None:
    assert did_you_mean("kepe", ["keep", "target"]) == "; did you mean keep?"
    assert did_you_mean(3, ["keep", "target"]) == "; there are keep, target"
    many = [f"layer{i}.weight" for i in range(60)]
    assert did_you_mean("?", many).endswith("layer49.weight and 10 more")


@pytest.mark.parametrize(
    ("error", "first", "whole", "short"),
    [
        (ValueError("\n one\n  two"), "one", "one two", "ValueError: one"),
        (KeyError(), "KeyError", "", "KeyError"),
        (OSError("x" * 300), "x" * 300, "x" * 300, f"OSError: {'x' * 190}…"),
    ],
)
def test_what_another_error_said_fits_on_a_line(error: Exception, first: str, whole: str, short: str) -> None:
    assert (first_line(error), one_line(error), brief(error)) == (first, whole, short)


def test_a_batch_norm_with_one_value_per_channel_is_recognised_by_pytorch_s_own_error() -> None:
    with pytest.raises(ValueError) as one:  # noqa: PT011 - what it says is the subject
        nn.BatchNorm1d(3)(torch.ones(1, 3))
    with pytest.raises(ValueError) as dimensions:  # noqa: PT011
        nn.BatchNorm1d(3)(torch.ones(3))
    assert is_too_few_values(one.value)
    assert not is_too_few_values(dimensions.value)
    assert not is_too_few_values(RuntimeError(str(one.value)))
    assert not is_too_few_values(None)


def flat(**choices: object) -> hgnp.Flatness:
    return hgnp.Flatness(nn.Linear(3, 2), **choices)  # type: ignore[arg-type]


def least(**options: object) -> hgnp.Selection:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return hgnp.Neurons(net, torch.zeros(2, 3)).least({}, 1, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "old"),
    [
        *((lambda **o: hgnp.Recipe(keep=0.5, **o), old) for old in ("v_every", "rest_closed", "multiple", "engine")),
        *((lambda **o: hgnp.Recipe.from_dict({"keep": 0.5, **o}), old) for old in ("v_every", "multiple", "engine")),
        *((lambda **o: hgnp.Recipe(keep=0.5, flatness=o), old) for old in ("v_from", "convention", "labels")),
        *((flat, old) for old in ("v_every", "rest_closed", "v_from", "convention", "labels")),
        (least, "multiple"),
    ],
)
def test_an_option_under_its_former_name_is_refused_with_the_new_one(call: Callable[..., object], old: str) -> None:
    with pytest.raises(ValueError, match=f"{old} is now called {RENAMED[old]}") as caught:
        call(**{old: "x"})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "where"), [(lambda **o: hgnp.Recipe(keep=0.5, flatness=o), "flatness"), (flat, "Flatness")]
)
@pytest.mark.parametrize("value", ["batch", "frozen"])
def test_an_option_that_was_removed_is_refused_with_the_reason(
    call: Callable[..., object], where: str, value: str
) -> None:
    with pytest.raises(ValueError, match=f"^{where}: norm was removed: .* ruined training .*; omit it$"):
        call(norm=value)


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    net, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(2, 3)
    with pytest.raises(
        TypeError, match=r"^Neurons: option must be a known one, got 'multiple'; there are net, example_"
    ):
        hgnp.Neurons(net, x, multiple=8)  # type: ignore[call-arg]
    with pytest.raises(
        TypeError, match=r"^sensitivity: option must be a known one, got 'labels'; there are net, neurons,"
    ):
        hgnp.sensitivity(net, hgnp.Neurons(net, x), [], labels=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("function", [hgnp.Recipe, hgnp.Flatness, hgnp.Neurons, hgnp.Neurons.least, hgnp.sensitivity])
def test_signatures_show_the_options_and_none_by_a_former_name(function: Callable[..., object]) -> None:
    names = inspect.signature(function).parameters
    assert len(names) > 4
    assert not {*RENAMED, *REMOVED} & set(names)


SOURCES = Path(hgnp.__file__).parent
EXPECTED = (OSError, AttributeError, KeyboardInterrupt)
"""Built-in errors that callers expect by that type: of the file system, of `__getattr__`, of Ctrl-C."""
INTERNAL = {
    "curvature/autodiff/passes.py": "RuntimeError: stops the capture of a CUDA graph, as PyTorch itself does",
    "curvature/autodiff/rng.py": "RuntimeError: stops the capture of a CUDA graph, as PyTorch itself does",
    "pruning/trace.py": "RuntimeError: an operator on fake tensors fails as PyTorch's own does",
    "reference.py": "ValueError: imports PyTorch alone",
}
"""Files that raise another built-in error, and why."""


def raised(tree: ast.AST) -> set[type[BaseException]]:
    """The built-in errors that a tree raises by name."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            kind = getattr(builtins, ast.unparse(error), None)
            if isinstance(kind, type) and issubclass(kind, BaseException):
                found.add(kind)
    return found


def test_the_sources_raise_errors_of_hgnp() -> None:
    files = {file.relative_to(SOURCES).as_posix(): file for file in SOURCES.rglob("*.py")}
    assert raised(ast.parse("raise ValueError('x')\nraise TypeError\nraise InputError('x')")) == {ValueError, TypeError}
    unexpected = {
        name: sorted(
            kind.__name__
            for kind in raised(ast.parse(file.read_text(encoding="utf-8")))
            if not issubclass(kind, EXPECTED)
        )
        for name, file in files.items()
    }
    found = {name: kinds for name, kinds in unexpected.items() if kinds}
    assert found == {name: [reason.partition(":")[0]] for name, reason in INTERNAL.items()}


def test_every_error_is_an_hgnp_error_and_a_built_in_one() -> None:
    classes = [each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, Exception)]
    assert hgnp.HgnpError in classes
    assert hgnp.DivergedError in classes
    for each in classes:
        assert issubclass(each, hgnp.HgnpError)
        assert each is hgnp.HgnpError or any(base.__module__ == "builtins" for base in each.__bases__)
