"""What error messages have in common."""

import pytest

from hgnp.messages import brief, first_line, meant, one_line


def test_a_name_that_is_close_is_offered_and_otherwise_those_that_there_are() -> None:
    assert meant("kepe", ["keep", "target"]) == "; did you mean keep?"
    assert meant(3, ["keep", "target"]) == "; there are keep, target"
    many = [f"layer{i}.weight" for i in range(60)]
    assert meant("?", many).endswith("layer49.weight and 10 more")


@pytest.mark.parametrize(
    ("error", "first", "whole", "short"),
    [
        (ValueError("\n one\n  two"), "one", "one two", "ValueError: one"),
        (KeyError(), "KeyError", "", "KeyError"),
        (OSError("x" * 300), "x" * 300, "x" * 300, f"OSError: {'x' * 190}…"),
    ],
)
def test_what_another_error_said_fits_on_a_line(error: Exception, first: str, whole: str, short: str) -> None:
    assert (first_line(error), one_line(error), brief(error)) == (first, whole, short)
