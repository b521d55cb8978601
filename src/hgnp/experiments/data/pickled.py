"""CIFAR-10's Python files, read without unpickling them.

They are pickles, which can name any function and have it called. Here the opcodes that the official files are made of are
followed on plain values; the three names they use stand for themselves, as inert records, and nothing is imported or called.
Any other opcode, any other name and any other shape of things is refused.
"""

import pickletools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LARGEST = 64 * 2**20  # an official file has 31 MB
ARRAY, KIND, MAKE = "numpy ndarray", "numpy dtype", "numpy.core.multiarray _reconstruct"
LITERALS = {"BININT", "BININT1", "BININT2", "BINSTRING", "SHORT_BINSTRING"}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
MARK = object()


@dataclass(frozen=True)
class Name:
    name: str


@dataclass
class Record:
    """What a pickle would make by calling `name` with `args` and giving it `state`."""

    name: str
    args: Any
    state: Any = None


def read_batch(file: Path, pixels: int) -> tuple[npt.NDArray[np.uint8], list[int]]:
    """The rows of `pixels` bytes and the labels of one official file."""
    size = file.stat().st_size
    if size > LARGEST:
        raise ValueError(f"{file}: {size:,} bytes; an official CIFAR-10 file has about 31,000,000")
    try:
        found = _values(file.read_bytes())
    except _RefusedError as error:
        raise ValueError(f"{file}: refused, {error}; nothing in it was run") from None
    except (ValueError, IndexError, TypeError, KeyError, AttributeError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"{file}: damaged or not an official CIFAR-10 file ({' '.join(str(error).split())[:80]})"
        ) from None
    problem = f"{file}: not an official CIFAR-10 file, whose 'data' are rows of {pixels:,} bytes, with as many 'labels'"
    match found:
        case {
            "data": Record(name=name, state=(1, (int(count), int(width)), Record(args=("u1", 0, 1)), bool(fortran), str(raw))),
            "labels": list(labels),
        } if name == MAKE and width == pixels and count == len(labels) > 0:  # fmt: skip
            data = np.frombuffer(bytearray(raw, "latin-1"), dtype=np.uint8)
        case _:
            raise ValueError(problem)
    if data.size != count * width or not all(type(label) is int for label in labels):
        raise ValueError(problem)
    return np.ascontiguousarray(data.reshape((count, width), order="F" if fortran else "C")), labels


class _RefusedError(Exception):
    pass


def _values(pickled: bytes) -> Any:
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
                count = TUPLES[name]
                items = [stack.pop() for _ in range(count)]
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
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "BINPUT" | "LONG_BINPUT":
                memo[arg] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[arg])
            case "GLOBAL":
                if arg not in (ARRAY, KIND, MAKE):
                    raise _RefusedError(
                        f"it names {str(arg).replace(' ', '.')[:60]!r}, which no official CIFAR-10 file does"
                    )
                stack.append(Name(arg))
            case "REDUCE":
                args = stack.pop()
                stack.append(Record(stack.pop().name, args))
            case "BUILD":
                state = stack.pop()
                stack[-1].state = state
            case _:
                raise _RefusedError(f"its opcode {opcode.name} is in no official CIFAR-10 file")
    raise ValueError("it has no end")
