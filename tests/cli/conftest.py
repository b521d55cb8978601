"""Every test of a command runs in an empty folder, leaves `sys.path` as found, and, in this process, renders no figures."""

import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="module")
def _quickly(figures_not_rendered: None) -> None:
    pass


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
