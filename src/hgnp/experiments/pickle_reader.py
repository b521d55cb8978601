"""Reads pickles without unpickling them.

A pickle is a program that can call any function. This module interprets the few opcodes of data files on plain values: a
global stays a name, a call becomes an inert `Record` of the function's name and its arguments. Nothing is imported or called.
Every other opcode, and every name that the caller does not list, is refused.
"""

import pickletools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from hgnp.errors import InputError

LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINSTRING", "SHORT_BINSTRING", "BINUNICODE"}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
MARK = object()
# raised by `values` for a damaged pickle; UnsafePickleError for one with other contents
DAMAGED = (ValueError, IndexError, TypeError, KeyError, AttributeError, RecursionError, MemoryError)


class UnsafePickleError(Exception):
    """A pickle has an opcode or a name that such files do not have."""


@dataclass(frozen=True)
class Name:
    """A global, as "module name"."""

    name: str


@dataclass(frozen=True)
class Persistent:
    """Data outside a pickle, by its persistent id."""

    id: Any


@dataclass
class Record:
    """The object that unpickling would build: `name` called with `args`, with its `state` and `items`."""

    name: str
    args: tuple[Any, ...]
    state: Any = None
    items: dict[str, Any] = field(default_factory=dict)


def values(pickled: bytes | BinaryIO, names: Collection[str], what: str) -> Any:
    """The value of one pickle; a stream is left at its end. `what` names the file type in error messages."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        items: list[Any] = []
        while (top := stack.pop()) is not MARK:
            items.append(top)
        return items[::-1]

    arg: Any
    for opcode, arg, _ in pickletools.genops(pickled):
        match opcode.name:
            case "PROTO":
                pass
            case "STOP":
                return stack.pop()
            case name if name in LITERALS:
                stack.append(arg)
            case name if name in CONSTANTS:
                stack.append(CONSTANTS[name])
            case name if name in TUPLES:
                items = [stack.pop() for _ in range(TUPLES[name])]
                stack.append(tuple(items[::-1]))
            case "MARK":
                stack.append(MARK)
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "APPEND":
                item = stack.pop()
                stack[-1].append(item)
            case "APPENDS":
                items = since_mark()
                stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                items = since_mark() if opcode.name == "SETITEMS" else [stack.pop(), stack.pop()][::-1]
                keys = items[::2]
                if not all(isinstance(key, str) for key in keys):  # hashing nested tuples can take exponential time
                    raise UnsafePickleError(f"a key of a mapping is not a string, which no {what} has")
                target = stack[-1].items if isinstance(stack[-1], Record) else stack[-1]
                target.update(zip(keys, items[1::2], strict=True))
            case "BINPUT" | "LONG_BINPUT":
                memo[arg] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[arg])
            case "BINPERSID":
                stack.append(Persistent(stack.pop()))
            case "GLOBAL":
                if arg not in names:
                    raise UnsafePickleError(f"it names {str(arg).replace(' ', '.')[:60]!r}, which no {what} does")
                stack.append(Name(arg))
            case "REDUCE" | "NEWOBJ":
                args = stack.pop()
                stack.append(Record(stack.pop().name, args))
            case "BUILD":
                state = stack.pop()
                stack[-1].state = state
            case _:
                raise UnsafePickleError(f"its opcode {opcode.name} is in no {what}")
    raise InputError("it has no end")
