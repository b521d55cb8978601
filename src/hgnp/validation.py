"""Validation that every package shares: networks whose modules hide or split their operations, and flags."""

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hgnp.errors import InputError, InputTypeError

PARALLEL = {
    "DistributedDataParallel": "pass net.module, and to Flatness and sensitivity group=net.process_group: hgnp sums gradients "
    "itself",
    "DataParallel": "pass net.module, and start one process per GPU by torchrun",
    "FullyShardedDataParallel": "pass the network before it is sharded; hgnp trains whole networks on every rank",
    "FSDPModule": "pass the network before fully_shard; hgnp trains whole networks on every rank",
}
"""Class of a wrapper → what to do."""


def check_module(net: object) -> None:
    if not isinstance(net, nn.Module):
        raise InputTypeError(f"net must be an nn.Module, got {type(net).__name__}")


def check_values(net: nn.Module) -> None:
    """InputError, naming the tensor, if one is on the meta device."""
    for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
        if tensor.is_meta:
            raise InputError(f"{name} must be on a device with data, got meta; move net to a CPU or a GPU and fill it")


def check_net(net: object) -> None:
    """InputTypeError or InputError, naming the layer, unless `net` is made of plain modules: none is compiled, scripted or
    quantised, which hides operations, and none sends gradients elsewhere or holds a part of the network alone."""
    check_module(net)
    assert isinstance(net, nn.Module)
    for name, module in net.named_modules():
        if problem := _problem(module):
            raise InputTypeError(f"{f'layer {name!r}' if name else 'net'} must be a plain module, got {problem}")
    for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
        if is_lazy(tensor):
            raise InputError(f"{name} must be initialised, got a lazy module; run one forward pass first")
        if type(tensor).__name__ == "DTensor":
            raise InputTypeError(
                f"{name} must be a plain tensor, got a DTensor of tensor parallelism; pass the network before it is sharded"
            )


def _problem(module: nn.Module) -> str | None:
    """What the module is instead of a plain one, and what to do."""
    for kind in type(module).__mro__:
        if kind.__name__ in PARALLEL and kind.__module__.startswith("torch."):
            return f"{kind.__name__}; {PARALLEL[kind.__name__]}"
    if isinstance(module, torch.jit.ScriptModule):
        return "a scripted one; pass the original module, and script it afterwards"
    compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None  # torch.compile, Module.compile
    if compiled or any(_is_compiled(function) for function in (module.forward, *vars(module).values())):
        return "a compiled one; pass the original module, and compile it afterwards"
    package, *path = type(module).__module__.split(".")
    if package == "torch" and {"quantized", "quantizable"} & set(path):
        return f"a quantised {type(module).__name__}; pass the original module, and quantise it afterwards"
    return None


def _is_compiled(function: Any) -> bool:
    """Whether torch.compile returned it, by an attribute that functions of torch.compiler.disable have too: there is no API."""
    return hasattr(function, "_torchdynamo_orig_callable") and not getattr(function, "_torchdynamo_disable", False)


def check_flags(**given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, bool):
            raise InputTypeError(f"{name} must be True or False, got {value!r}")
