"""The examples in docstrings of public classes and functions, and those with prompts in docs/, run and print what they show."""

import doctest
import re
from pathlib import Path

import pytest

import hgnp
from hgnp.pruning import Preview
from hgnp.training.task import CallbackState

OBJECTS = {name: getattr(hgnp, name) for name in hgnp.__all__} | {"Preview": Preview, "CallbackState": CallbackState}


@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_the_docstring_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = [test for test in finder.find(OBJECTS[name], name, module=False, globs={}) if test.examples]
    assert tests
    for test in tests:
        assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0


def test_the_examples_with_prompts_in_the_pages_run() -> None:
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    examples = [
        (page.name, example)
        for page in sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
        for example in re.findall(r"```python\n(>>> .*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    ]
    assert examples
    for page, example in examples:
        assert runner.run(parser.get_doctest(example, {}, page, page, 0)).failed == 0
