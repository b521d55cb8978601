"""Kernels of our own, where Triton is there and can compile for the device."""

import functools
import importlib
from typing import Any

import torch


@functools.cache
def kernels(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """The module of that name, or None where its kernels do not work: then PyTorch's operations do the same."""
    try:
        module = importlib.import_module(f"hgnp.curvature.{name}")
        module.try_out(dtype, device)
    except Exception:  # of its import, its compiler, a C compiler, the driver
        return None
    return module
