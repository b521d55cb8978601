"""Safe YAML: plain types only, 1e-3 is a number, and the expanded size is bounded.

Aliases let ten lines stand for billions of values ("billion laughs"): every node counts once per reference.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hgnp.errors import InputError, one_line

MAX_CHARACTERS = 100_000
MAX_NODES = 10_000
MAX_DEPTH = 50


class TooLargeError(InputError):
    pass


def read(file: Path) -> Any:
    """Read a YAML file; InputError, in one line that starts with its name, if it is invalid."""
    try:
        with file.open(encoding="utf-8") as stream:
            text = stream.read(MAX_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise InputError(f"{file} must be text in UTF-8, got {error.reason} at byte {error.start}") from error
    return load(text, where=str(file))


def load(text: str, *, where: str) -> Any:
    """Parse YAML; InputError, in one line that starts with `where`, if it is invalid or too large."""
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"{where} must have at most {MAX_CHARACTERS:,} characters, got more")
    try:
        return yaml.load(text, Loader=_Loader)
    except TooLargeError as error:
        raise InputError(f"{where} {error}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date, a number of thousands of digits
        raise InputError(f"{where} must be YAML, got text that is not: {one_line(error)}") from error


@dataclass(frozen=True)
class _Extent:
    """The expanded size of a node."""

    nodes: int
    characters: int
    depth: int


class _Loader(yaml.SafeLoader):
    """Safe, bounded, and reads 1e-3 as a number, where YAML 1.1 requires 1.0e-3."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._extents: dict[yaml.Node, _Extent] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark
        self._depth += 1
        if self._depth > MAX_DEPTH:  # before the parser's recursion exhausts the stack
            raise _too_much(f"{MAX_DEPTH} levels", mark)
        alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if not alias:
            self._extents[node] = self._measured(node)
        elif node not in self._extents:
            raise TooLargeError(f"must have no alias inside its own anchor, got one in line {mark.line + 1}")
        extent = self._extents[node]
        for size, most, what in (
            (
                max(extent.nodes, len(self._extents)),
                MAX_NODES,
                "values",
            ),  # the document has at least the nodes read so far
            (extent.characters, MAX_CHARACTERS, "characters"),
            (extent.depth, MAX_DEPTH, "levels"),
        ):
            if size > most:
                raise _too_much(f"{most:,} {what}", mark)
        return node

    def _measured(self, node: yaml.Node) -> _Extent:
        if isinstance(node, yaml.ScalarNode):
            return _Extent(1, len(node.value), 1)
        children = node.value if isinstance(node, yaml.SequenceNode) else [each for pair in node.value for each in pair]
        parts = [self._extents[child] for child in children]
        return _Extent(
            1 + sum(part.nodes for part in parts),
            sum(part.characters for part in parts),
            1 + max((part.depth for part in parts), default=0),
        )


def _too_much(bound: str, mark: yaml.Mark) -> TooLargeError:
    return TooLargeError(f"must expand to at most {bound}, aliases included, got more in line {mark.line + 1}")


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"), list("-+0123456789")
)
