"""Whether Triton's kernels are used, and what is said where they fail."""

import importlib.util
import warnings

import pytest
import torch

from hgnp.curvature.kernels.support import kernels

CPU = torch.device("cpu")


def test_kernels_that_fail_warn_once_with_the_reason() -> None:
    kernels.cache_clear()
    with pytest.warns(UserWarning, match=r"Triton kernels \(support, torch.float32\) do not work on cpu.*check"):
        assert kernels("support", torch.float32, CPU) is None  # a module that cannot be tried out
    assert kernels("support", torch.float32, CPU) is None  # a warning is an error in these tests
    with pytest.warns(UserWarning, match="hgnp.curvature.kernels.missing"):
        assert kernels("missing", torch.float32, CPU) is None


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is there")
def test_kernels_are_absent_without_a_warning_where_triton_is() -> None:
    kernels.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels("batch_norm", torch.float32, CPU) is None
