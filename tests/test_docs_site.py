"""The documentation site: every page can be reached, the reference has every public name, and the examples run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hgnp

DOCS = Path(__file__).parents[1] / "docs"
EXAMPLES = sorted((DOCS / "examples").glob("*.py"))


def test_every_page_is_in_a_table_of_contents() -> None:
    entries = {
        entry.strip()
        for page in DOCS.glob("*.md")
        for block in re.findall(r"```{toctree}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        for entry in block.splitlines()
    }
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")}
    pages = {page for page in pages if not page.startswith(("gallery/", "generated/"))}
    assert pages - {"index"} <= entries
    assert "gallery/index" in entries


def test_the_reference_has_every_public_name() -> None:
    documented = re.findall(r"\.\. auto\w+:: (\w+)", (DOCS / "reference.md").read_text(encoding="utf-8"))
    assert sorted(documented) == sorted(hgnp.__all__)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    env = os.environ | {"MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, example], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
