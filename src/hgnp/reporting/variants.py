"""Variants of running a network: eager, without TF32, channels last, compiled, in half precision, by ONNX Runtime."""

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from hgnp.errors import InputError
from hgnp.io.export import export, onnx_session, run_onnx

Variant = Literal["eager", "no_tf32", "channels_last", "compile", "bf16", "fp16", "onnx"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULTS: dict[str, tuple[Variant, ...]] = {
    "cpu": ("eager", "channels_last", "compile", "bf16", "onnx"),
    "cuda": ("eager", "no_tf32", "channels_last", "compile", "fp16", "bf16"),
}


@dataclass(frozen=True)
class PreparedNetwork:
    """A network ready to be called in one variant, and the conversion of its inputs."""

    call: Callable[..., Any]
    convert: Callable[[Tensor], Tensor] = lambda tensor: tensor


def prepare(variant: Variant, net: nn.Module, example: Sequence[Tensor]) -> PreparedNetwork:
    """`net`, in eval mode on its device, prepared to run as `variant`; ValueError if the variant does not apply to it."""
    if variant == "channels_last":
        if not any(isinstance(module, nn.Conv2d) for module in net.modules()):
            raise InputError("net must have 2-d convolutions for variant 'channels_last', got none")
        return PreparedNetwork(_to_channels_last(copy.deepcopy(net)), _channels_last)
    if variant == "no_tf32":
        if example[0].device.type != "cuda":
            raise InputError(f"device must be cuda for variant 'no_tf32', got {example[0].device.type}")
        return PreparedNetwork(without_tf32(net))
    if variant == "compile":
        return PreparedNetwork(torch.compile(net, dynamic=False))
    if variant in HALVES:
        dtype = HALVES[variant]
        half = _to_channels_last(copy.deepcopy(net).to(dtype))  # tensor cores and AMX want channels last
        return PreparedNetwork(
            half, lambda tensor: _channels_last(tensor.to(dtype) if tensor.is_floating_point() else tensor)
        )
    if variant == "onnx":
        if example[0].device.type != "cpu":
            raise InputError(f"device must be cpu for variant 'onnx', got {example[0].device.type}")
        with tempfile.TemporaryDirectory() as folder:
            exported = export(net, Path(folder) / "net.onnx", tuple(example))
            session = onnx_session(exported.path, threads=torch.get_num_threads())
        return PreparedNetwork(lambda *tensors: run_onnx(session, tensors))
    return PreparedNetwork(net)


def without_tf32(net: nn.Module) -> Callable[..., Any]:
    """Full float32, as older GPUs compute: cuDNN's convolutions use TF32 by default."""

    def call(*tensors: Tensor) -> Any:
        before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
        try:
            return net(*tensors)
        finally:
            torch.backends.cudnn.allow_tf32 = before

    return call


def _to_channels_last(net: nn.Module) -> nn.Module:
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in the stubs


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


@contextmanager
def compile_limits() -> Iterator[None]:
    """Raises torch.compile's limit: networks of one class share their code, and by default the ninth silently runs eagerly."""
    import torch._dynamo.config as config

    with warnings.catch_warnings(), config.patch(cache_size_limit=256, fail_on_cache_limit_hit=True):
        # torch 2.13's compiler imports what torch itself deprecates
        warnings.filterwarnings("ignore", r"`torch\.jit\.script_method` is deprecated", DeprecationWarning)
        yield
