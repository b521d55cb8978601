"""A second device on any machine: tensors whose memory and arithmetic are the CPU's, and which raise where an operation mixes
them with tensors of the CPU, as those of a GPU do.

PyTorch knows the kind of device, MAIA, but brings no kernels for it. Here it gets one for each operator that has one on the
CPU. All else is PyTorch's own: autograd, forward mode, fake tensors and modes see tensors on a device, as on a GPU. Random
numbers come from the CPU's generator, so that results can be compared. What is for CUDA alone needs a GPU: graphs, streams,
kernels, autocast, and code behind `is_cuda`.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._C import DispatchKey, _dispatch_get_all_op_names, _dispatch_has_kernel_for_dispatch_key
from torch._C._autograd import DeviceType
from torch.utils.dlpack import from_dlpack, to_dlpack

CPU, PRETENDED = torch.device("cpu"), torch.device("maia:0")
DLPACK_KINDS = {CPU: 1, PRETENDED: 17}
"""The devices in PyTorch's format of exchange."""
COMPOSED = ("copy_", "convolution", "convolution_backward", "_convolution")
"""Operators without a kernel on the CPU whose parts look up a device's functions themselves."""
TAKE_NUMBERS = ("add", "sub", "mul", "div", "floor_divide", "copy")
"""Operators that take a number in place of a tensor; others take a tensor of it."""


class Generator(torch.Generator):
    """torch.Generator, which can be on the pretended device too. Its state is then of another size, as that of a GPU is."""

    devices: ClassVar[dict[int, torch.device]] = {}

    def __new__(cls, device: Any = CPU) -> "Generator":
        made = super().__new__(cls)
        cls.devices[made._cdata] = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:
        return self.devices[self._cdata]

    def get_state(self) -> Tensor:
        state = super().get_state()
        return state if self.device == CPU else torch.cat([state, state[:1]])

    def set_state(self, state: Tensor) -> "Generator":
        if state.shape != self.get_state().shape:
            raise RuntimeError("RNG state is wrong size")
        super().set_state(state if self.device == CPU else state[:-1])
        return self

    def clone_state(self) -> "Generator":
        return Generator(self.device).set_state(self.get_state())


def memory_on(device: torch.device, tensor: Tensor) -> Tensor:
    """The same memory as a tensor on another device: in the format of exchange the kind of device is a number."""
    if tensor.device == device:
        return tensor
    if tensor._is_zerotensor():  # of a derivative that is zero: it has no memory
        tensor = torch.ops.aten.zeros(tensor.shape, dtype=tensor.dtype)
    capsule = to_dlpack(torch.ops.aten.detach(tensor))
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 8).value = DLPACK_KINDS[device]
    return from_dlpack(capsule)


def to_cpu(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [to_cpu(part) for part in value]
    if isinstance(value, Tensor):
        return memory_on(CPU, value) if value.numel() else torch.ops.aten.empty_like(value, device=CPU)
    return CPU if isinstance(value, torch.device) else value


def from_cpu(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(from_cpu(part) for part in value)
    return memory_on(PRETENDED, value) if isinstance(value, Tensor) else value


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in tensors_in(part)]
    return [value] if isinstance(value, Tensor) else []


def kernel(op: Any) -> Callable[..., Any]:
    """The operator's kernel on the pretended device."""
    name, arguments, returns = op._schema.name.removeprefix("aten::"), op._schema.arguments, op._schema.returns
    writes = [each.name for each in arguments if each.alias_info and each.alias_info.is_write]
    of_numbers = [
        each.name for each in arguments if str(each.type) == "Tensor" and name.rstrip("_") not in TAKE_NUMBERS
    ]
    is_view = any(each.alias_info and not each.alias_info.is_write for each in returns)
    overloads = [getattr(op.overloadpacket, each) for each in op.overloadpacket.overloads()]
    pointwise = any(torch.Tag.pointwise in each.tags for each in overloads)

    def check(given: dict[str, Any], written: list[Tensor]) -> None:
        """Copies take any tensors. Indices may be on the CPU, and so may tensors without dimensions, which are numbers to
        pointwise operators."""
        if name == "copy_":
            return
        indexing = name in ("index", "_index_put_impl_") and given["self"].device == PRETENDED
        read = tensors_in([value for key, value in given.items() if not (indexing and key == "indices")])
        if pointwise or name in ("masked_fill_", "_index_put_impl_"):
            read = [tensor for tensor in read if tensor.dim() or tensor.device == PRETENDED]
        generators = [each for each in given.values() if isinstance(each, torch._C.Generator)]
        devices = {each.device for each in [*read, *written]} | {
            Generator.devices.get(each._cdata, CPU) for each in generators
        }
        if len(devices) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices in {op}")

    def run(*args: Any, **kwargs: Any) -> Any:
        if is_view:
            return op._op_dk(DispatchKey.CPU, *args, **kwargs)  # sizes and strides alone
        given = {each.name: value for each, value in zip(arguments, args, strict=False)} | kwargs
        written = tensors_in([given.get(each) for each in writes])
        check(given, written)
        here = {key: to_cpu(value) for key, value in given.items()}
        here |= {key: torch.tensor(here[key]) for key in of_numbers if isinstance(here.get(key), int | float)}
        result = op(**here)
        for tensor, mine in zip(written, tensors_in([here.get(each) for each in writes]), strict=True):
            if tensor.shape != mine.shape:  # the operator has made it as large as its result
                tensor.data = memory_on(PRETENDED, mine)
        if returns and returns[0].alias_info:
            return written[0] if len(returns) == 1 else tuple(written)
        return from_cpu(result)

    return run


def register_kernels() -> Any:
    library = torch.library.Library("aten", "IMPL")
    for full_name in _dispatch_get_all_op_names():
        namespace, _, full = full_name.partition("::")
        name, _, overload = full.partition(".")
        if namespace == "aten" and (name in COMPOSED or _dispatch_has_kernel_for_dispatch_key(full_name, "CPU")):
            op = getattr(getattr(torch.ops.aten, name), overload or "default")
            library.impl(op, kernel(op), "MAIA")
    return library


@contextmanager
def pretended_device() -> Iterator[None]:
    """Inside the block there is the device `PRETENDED`."""
    if torch.__version__ < "2.7":
        pytest.skip("PyTorch 2.6 does not take kernels for all operators of another device")
    c10 = ctypes.CDLL(str(next(Path(torch.__file__).with_name("lib").glob("libc10.*"))))
    guards = (ctypes.c_void_p * 20).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    maia, meta = DeviceType.MAIA.value, DeviceType.Meta.value  # the guard of meta tensors does nothing
    deepcopy, move = Tensor.__deepcopy__, nn.Module.to

    def copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if tensor.device != PRETENDED:
            return deepcopy(tensor, memo)
        memo[id(tensor)] = made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return made

    def moved(net: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The parameters stay the same objects, as where a network moves to a GPU; those of recurrent layers do not."""
        recurrent = any(isinstance(module, nn.RNNBase) for module in net.modules())
        torch.__future__.set_swap_module_params_on_conversion(not recurrent)
        try:
            return move(net, *args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    library, guards[maia] = register_kernels(), guards[meta]
    try:
        # the threads of a device start with the first backward pass of the process, which may be over
        with pytest.MonkeyPatch.context() as patch, torch.autograd.set_multithreading_enabled(False):
            patch.setattr(torch, "Generator", Generator)
            patch.setattr(Tensor, "__deepcopy__", copied)
            patch.setattr(nn.Module, "to", moved)
            yield
    finally:
        library._destroy()
        guards[maia] = None
