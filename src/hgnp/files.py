"""Files that appear whole or not at all."""

import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A place to write to, on the same disk and of the same name, that becomes `path` if the block ends well.

    Folders above `path` are made. If the block raises, `path` is as it was before. The content is on the disk before it gets
    the name, so that a crash leaves the old file or the new one.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        draft = Path(folder) / path.name
        yield draft
        with open(draft, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(draft, path)


def write_text(file: Path, text: str) -> None:
    with whole(file) as draft:
        draft.write_text(text, encoding="utf-8")


def write_json(file: Path, content: Any) -> None:
    write_text(file, as_json(content, indent=2) + "\n")


def read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: damaged: {error}") from None


def as_json(value: Any, indent: int | None = None) -> str:
    """JSON has no numbers that are not finite: null stands for them."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value
