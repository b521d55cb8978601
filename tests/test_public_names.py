"""What `import hgnp` offers: public names alone, each documented."""

import inspect
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


TO_DOCUMENT = {"sensitivity", "sharpness"}
"""Names whose docstring has no example yet; a name that has one must leave this list."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.xfail(strict=True, reason="no example")] * (name in TO_DOCUMENT))
        for name in sorted(hgnp.__all__)
    ],
)
def test_a_public_name_has_a_docstring_with_an_example_or_its_arguments(name: str) -> None:
    text = getattr(hgnp, name).__doc__ or ""
    assert any(part in text for part in (">>> ", "::\n", "Args:\n", "Attributes:\n", "Example")), text
