"""The command `hgnp`, called in this process."""

import pytest

from hgnp.cli import app


def call(*arguments: str) -> int:
    """Run `hgnp` with these arguments. Returns its exit code."""
    with pytest.raises(SystemExit) as ended:
        app(list(arguments))
    return int(ended.value.code or 0)
