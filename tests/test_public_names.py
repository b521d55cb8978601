"""What `import hgnp` offers: public names alone, each documented."""

import inspect
import re
import subprocess
import sys

import pytest

import hgnp


def test_dir_lists_public_names_alone() -> None:
    code = "import hgnp; print(*dir(hgnp))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert set(names) == {*hgnp.__all__, "__version__"}
    assert set(dir(hgnp)) == set(names)  # also after the modules are loaded
    assert all(hasattr(hgnp, name) for name in names)
    assert not any(inspect.ismodule(getattr(hgnp, name)) for name in names)


@pytest.mark.parametrize("name", sorted(hgnp.__all__))
def test_a_public_name_has_a_docstring_with_an_example(name: str) -> None:
    assert ">>> " in (getattr(hgnp, name).__doc__ or "")


@pytest.mark.parametrize("name", sorted(set(hgnp.__all__) - {"DivergedError", "HgnpError", "Selection"}))
def test_help_explains_every_argument(name: str) -> None:
    """And every field of a dataclass. Errors and selections are not made by users."""
    text = inspect.getdoc(getattr(hgnp, name)) or ""
    arguments = inspect.signature(getattr(hgnp, name)).parameters
    assert [each for each in arguments if not re.search(rf"^ +{each}: \S", text, re.MULTILINE)] == []
