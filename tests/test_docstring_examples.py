"""The examples in the docstrings of the public names run and print what they show."""

import doctest
from pathlib import Path

import pytest

import hgnp


@pytest.mark.parametrize("name", sorted(hgnp.__all__))
def test_the_docstring_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = [test for test in finder.find(getattr(hgnp, name), name, module=False, globs={}) if test.examples]
    assert tests
    for test in tests:
        assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0
