"""Half precision is read as it is and summed in float32."""

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def wide_bmm(x: Tensor, y: Tensor) -> Tensor:
    """x @ y, (B, n, k) and (B, k, m), to float32 if they are of half precision; on a GPU without copies of them."""
    if x.dtype in HALF and x.is_cuda and hasattr(torch.ops.aten.bmm, "dtype"):  # torch 2.8
        product: Tensor = torch.ops.aten.bmm.dtype(x, y.to(x.dtype), torch.float32)
        return product
    return wide(x) @ wide(y)
