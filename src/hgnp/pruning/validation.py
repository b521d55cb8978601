"""Networks whose tensors cannot be cut in place, each with what to do instead."""

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hgnp.errors import InputError, InputTypeError


def refuse(net: object) -> None:
    """TypeError or ValueError, naming the layer, if `net` is not made of plain modules with plain dense tensors."""
    if not isinstance(net, nn.Module):
        raise InputTypeError(f"net must be an nn.Module, not {type(net).__name__}")
    for name, module in net.named_modules():
        where = f"layer {name!r}" if name else "net"
        kind = type(module)
        home = kind.__module__
        if isinstance(module, torch.jit.ScriptModule):
            raise InputTypeError(f"{where} is scripted: its code is fixed; prune the Python module, then script it")
        if kind.__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            raise InputTypeError(f"{where} is compiled: prune the module it was made from, then compile it again")
        if kind.__name__ in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"):
            raise InputTypeError(
                f"{where} is wrapped in {kind.__name__}: prune the module inside (.module), then wrap it again"
            )
        if "quantized" in home.split(".") or "quantizable" in home.split("."):
            raise InputTypeError(f"{where} is quantised ({kind.__name__}): prune first, then quantise")
    for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
        _refuse_tensor(name, tensor)


def _refuse_tensor(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise InputError(f"{name} is not initialised yet (a lazy module): run one forward first")
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        raise InputTypeError(
            f"{name} is a {type(tensor).__name__}: only plain tensors can be cut; prune before sharding or converting"
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise InputTypeError(
            f"{name} is {'quantised' if tensor.is_quantized else 'sparse'}: only dense tensors can be cut"
        )
