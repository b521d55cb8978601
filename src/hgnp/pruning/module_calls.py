"""Which module's call is running in a forward, and the how-many-eth of its calls it is.

PyTorch's own hooks for all modules say so. They are called for a module that fails too: a network may catch what one of its
modules raises and go on.
"""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle


class Frame(NamedTuple):
    """One call of a module."""

    module: str
    nth: int
    """How often the module had been called before, in this forward."""


class ModuleCalls:
    """Inside the block, `frame` is the call that is running. A module that the network does not list runs as part of its
    caller, and what runs outside the network as part of no call."""

    def __init__(self, net: nn.Module, entered: Callable[[Frame, tuple[Any, ...]], None] | None = None) -> None:
        self._names = {id(module): name for name, module in net.named_modules()}
        self._entered = entered
        self._stack: list[tuple[nn.Module, Frame]] = []
        self._counts: Counter[str] = Counter()
        self._hooks: list[RemovableHandle] = []
        self._thread = threading.get_ident()  # these hooks are everybody's

    @property
    def frame(self) -> Frame:
        return self._stack[-1][1] if self._stack else Frame("", -1)

    def __enter__(self) -> "ModuleCalls":
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._entered = None  # it may hold whoever holds this, and all tensors of the forward

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if threading.get_ident() != self._thread:
            return
        name = self._names.get(id(module))
        if name is None:
            self._stack.append((module, self.frame))
            return
        self._stack.append((module, Frame(name, self._counts[name])))
        self._counts[name] += 1
        if self._entered is not None:
            self._entered(self.frame, args)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # a module whose call failed before it was entered here is not on the stack
        if threading.get_ident() == self._thread and any(module is running for running, _ in self._stack):
            while self._stack.pop()[0] is not module:
                pass
