"""Which module call is running in a forward pass, and how many calls of that module came before it.

PyTorch's global module hooks report this. They also run for a module that raises: a network may catch the exception and
continue.
"""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle


class ModuleCall(NamedTuple):
    """One call of a module."""

    module: str
    previous_calls: int
    """How many calls of the same module came before it in this forward pass."""


class ModuleCallTracker:
    """Inside the block, `current` is the running module call. A module that the network does not list counts as part of its
    caller; code outside the network's modules belongs to no call."""

    def __init__(self, net: nn.Module, on_enter: Callable[[ModuleCall, tuple[Any, ...]], None] | None = None) -> None:
        self._names = {id(module): name for name, module in net.named_modules()}
        self._on_enter = on_enter
        self._stack: list[tuple[nn.Module, ModuleCall]] = []
        self._counts: Counter[str] = Counter()
        self._hooks: list[RemovableHandle] = []
        self._thread = threading.get_ident()  # global hooks run in every thread

    @property
    def current(self) -> ModuleCall:
        return self._stack[-1][1] if self._stack else ModuleCall("", -1)

    def __enter__(self) -> "ModuleCallTracker":
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._on_enter = None  # breaks a reference cycle that would hold all tensors of the forward pass

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if threading.get_ident() != self._thread:
            return
        name = self._names.get(id(module))
        if name is None:
            self._stack.append((module, self.current))
            return
        self._stack.append((module, ModuleCall(name, self._counts[name])))
        self._counts[name] += 1
        if self._on_enter is not None:
            self._on_enter(self.current, args)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # a module whose call failed before this tracker's pre-hook is not on the stack
        if threading.get_ident() == self._thread and any(module is running for running, _ in self._stack):
            while self._stack.pop()[0] is not module:
                pass
