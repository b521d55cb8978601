"""Files that appear whole or not at all."""

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def atomically(file: Path) -> Iterator[str]:
    """The name of a temporary file beside `file`, which takes its place once the block is left without an error.

    Its content is on the disk before it gets the name, so that a crash leaves the old file or the new one.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    os.close(handle)
    try:
        yield temporary
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write_text(file: Path, text: str) -> None:
    with atomically(file) as temporary:
        Path(temporary).write_text(text, encoding="utf-8")


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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
