"""Files that appear whole or not at all."""

import csv
import io
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def write(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write beside `path`, then rename. Folders are made if need be."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def write_json(path: str | os.PathLike[str], value: Any) -> Path:
    return write(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_csv(path: str | os.PathLike[str], header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """Cells that a spreadsheet would run as a formula get a quote in front; None is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_safe(name) for name in header])
    writer.writerows([_safe(cell) for cell in row] for row in rows)
    return write(path, text.getvalue())


def _safe(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell
