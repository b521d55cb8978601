"""The examples in the docstrings of the public classes run and print what they show."""

import doctest

import pytest

import hgnp


@pytest.mark.parametrize("public", [hgnp.Neurons, hgnp.Selection, hgnp.Removal])
def test_the_docstring_example_runs(public: type) -> None:
    tests = [test for test in doctest.DocTestFinder(recurse=False).find(public, public.__name__) if test.examples]
    assert tests
    for test in tests:
        assert doctest.DocTestRunner().run(test).failed == 0
