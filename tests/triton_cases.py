"""Triton for tests of kernels: on a GPU, or interpreted where Triton is there."""

import os

import pytest
import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def need_triton() -> None:
    """Skips a module without a Triton that can run its kernels. Must be called before Triton is imported."""
    reason = "needs Triton, which PyTorch brings for a GPU"
    if CUDA:
        pytest.importorskip("triton", reason=reason)
    else:
        os.environ["TRITON_INTERPRET"] = "1"
        # older interpreters convert arrays of one number by int(), which NumPy deprecated and 2.4 refuses
        pytest.importorskip("triton", minversion="3.7", reason=f"{reason}; its interpreter must be 3.7 or newer")
