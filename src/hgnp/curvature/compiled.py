"""Kernels of our own, where Triton is there and can compile for the device."""

import functools
import importlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def kernels(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """The module of that name, or None where its kernels do not work: then PyTorch's operations do the same."""
    try:
        module = importlib.import_module(f"hgnp.curvature.{name}")
        module.try_out(dtype, device)
    except Exception:  # of its import, its compiler, a C compiler, the driver
        return None
    return module


def where_tensors_are(function: Callable[P, R]) -> Callable[P, R]:
    """Triton launches on the current device, whichever the tensors are on."""

    @functools.wraps(function)
    def launched(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device_of(next(x for x in args if isinstance(x, Tensor))):
            return function(*args, **kwargs)

    return launched
