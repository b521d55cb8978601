"""hgnp's Triton kernels, where Triton is installed and can compile for the device."""

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from hgnp.errors import first_line

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def kernels(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """The module of that name, or None where its kernels do not work: then PyTorch's operations do the same. If Triton
    is installed but fails, one warning says so."""
    try:
        module = importlib.import_module(f"hgnp.curvature.kernels.{name}")
        module.check(dtype, device)
    except Exception as error:  # of its import, its compiler, a C compiler, the driver
        if not (isinstance(error, ModuleNotFoundError) and error.name == "triton"):
            warnings.warn(
                f"hgnp's Triton kernels ({name}, {dtype}) do not work on {device}; PyTorch's own, slower operations are used: "
                f"{first_line(error)}",
                stacklevel=2,
            )
        return None
    return module


def on_tensor_device(function: Callable[P, R]) -> Callable[P, R]:
    """Triton launches on the current device, whichever the tensors are on."""

    @functools.wraps(function)
    def launched(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device_of(next(x for x in args if isinstance(x, Tensor))):
            return function(*args, **kwargs)

    return launched
