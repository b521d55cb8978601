"""Liveness: which tensors the code that is running may still use.

A tensor is in use if anything refers to it. Local variables that no instruction reads any more do not count: a detector's
forward names its features long after its heads have read them. PyTorch and Python have no API for this, so references are
counted; `tests/pruning/test_values.py` fails if the counts change.
"""

import dis
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

CONTAINERS = (list, tuple, dict, OrderedDict)
HELD_BY_CALLER = 3
"""References to a tensor that only the caller's list holds: the list, a loop variable and the argument of `sys.getrefcount`."""
NO_NEXT = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")
READS_ALL = frozenset({"locals", "vars", "dir", "eval", "exec"})


def in_use(tensors: list[Tensor], reads_all: Callable[[FrameType], bool]) -> list[Tensor]:
    """Those of the tensors that something other than this list and PyTorch's graph of gradients refers to. Local variables that
    are not read any more do not count, except in frames of which `reads_all` is true."""
    counts = [
        sys.getrefcount(tensor) - HELD_BY_CALLER - _HELD_IN_CPP * (tensor._use_count() > 1)  # type: ignore[attr-defined]
        for tensor in tensors
    ]
    unread: Counter[int] = Counter()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not reads_all(frame):
            unread.update(map(id, _in_unread_locals(frame)))
        frame = frame.f_back
    return [tensor for tensor, count in zip(tensors, counts, strict=True) if count > unread[id(tensor)]]


def _in_unread_locals(frame: FrameType) -> Iterator[Tensor]:
    """The tensors in local variables that are not read any more, and in containers that only these refer to."""
    code = frame.f_code
    if READS_ALL & set(code.co_names):
        return
    unread = set(code.co_varnames) - set(code.co_cellvars) - _names_read_after(code, frame.f_lasti)
    for name in unread & frame.f_locals.keys():
        references = _references_from(frame, name)
        value = frame.f_locals[name]
        if isinstance(value, Tensor):
            yield value
        elif type(value) in CONTAINERS and references <= _SOLE_LOCAL:
            yield from _tensors_inside(value)


def _references_from(frame: FrameType, name: str) -> int:
    return sys.getrefcount(frame.f_locals[name])


def _tensors_inside(container: Any) -> Iterator[Tensor]:
    for part in container.values() if isinstance(container, dict) else container:
        if isinstance(part, Tensor):
            yield part
        elif type(part) in CONTAINERS and sys.getrefcount(part) <= HELD_BY_CALLER:
            yield from _tensors_inside(part)


@cache
def _names_read_after(code: CodeType, offset: int) -> frozenset[str]:
    """The local variables that instructions after this one may read, on any path."""
    bytecode = dis.Bytecode(code)
    instructions = list(bytecode)
    position = {instruction.offset: index for index, instruction in enumerate(instructions)}

    def followed_by(index: int) -> Iterator[int]:
        instruction = instructions[index]
        name = instruction.opname
        if instruction.opcode in (*dis.hasjrel, *dis.hasjabs):
            yield position[instruction.argval]
        if name not in NO_NEXT and (not name.startswith("JUMP_") or "IF" in name) and index + 1 < len(instructions):
            yield index + 1
        for entry in bytecode.exception_entries:  # type: ignore[attr-defined]
            if entry.start <= instruction.offset < entry.end:
                yield position[entry.target]

    current = max(index for index, instruction in enumerate(instructions) if instruction.offset <= max(offset, 0))
    pending, seen, names = list(followed_by(current)), set[int](), set[str]()
    while pending:
        index = pending.pop()
        if index in seen:
            continue
        seen.add(index)
        pending += followed_by(index)
        instruction = instructions[index]
        if "LOAD_FAST" in instruction.opname or "DELETE_FAST" in instruction.opname:
            names |= {instruction.argval} if isinstance(instruction.argval, str) else set(instruction.argval)
    return frozenset(names)


def _references_in_cpp() -> int:
    """How many references a tensor has because PyTorch's graph of gradients refers to it: 1 in some versions, 0 in others."""
    saved = torch.ones(1, requires_grad=True) * 1
    before = sys.getrefcount(saved)
    result = saved.sin()
    return sys.getrefcount(saved) - before + 0 * len(result)


def _references_to_local() -> int:
    """What `_references_from` returns for a container that one local variable refers to."""
    probe: Iterable[int] = [0]
    count = _references_from(sys._getframe(), "probe")
    return count + 0 * len(list(probe))


_HELD_IN_CPP = _references_in_cpp()
_SOLE_LOCAL = _references_to_local()
