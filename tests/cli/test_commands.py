"""The command's edges: help, version, bad input, exit codes, and what is not imported."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import hgnp
from command import call
from hgnp.cli import exit_code
from hgnp.recipe import Recipe


def test_help_version_and_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 0
    assert "Commands:" in capsys.readouterr().out
    assert call("--version") == 0
    assert capsys.readouterr().out == f"hgnp {hgnp.__version__}\n"
    assert call("presets") == 0
    assert capsys.readouterr().out.startswith("demo\tA convolutional network")
    assert call("presets", "demo") == 0
    assert capsys.readouterr().out.startswith("about: ")


def test_help_has_whole_summaries_and_no_python_types(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 0
    _, listed = capsys.readouterr().out.split("Commands:\n")
    assert "..." not in listed
    names = [line.split()[0] for line in listed.splitlines() if line]
    assert "compare" in names
    for name in names:
        assert call(name, "--help") == 0
        out = capsys.readouterr().out
        assert "<" not in out, out
        assert "…}" not in out, out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], "No such command 'frobnicate'. (see hgnp --help)"),
        (["report"], "Missing argument 'RUN'. (see hgnp report --help)"),
        (
            ["data", "imagenet", "d"],
            "dataset must be a known one, got 'imagenet'; there are cifar10, flowers102, cub200",
        ),
        (["bench", "x", "--weights", "2"], "--weights must be a fraction > 0 and ≤ 1, got 2"),
        (["run", "--sed", "3"], "No such option: --sed"),
        (["run", "--seed", "three"], "Invalid value for '--seed'"),
        (["run", "--seed", "-3"], "seed must be an integer from 0 to 4294967295, got -3"),
        (["run", "dem"], "preset must be a known one or a file, got 'dem'; did you mean demo?"),
        (["run", "missing.yaml"], "configuration must be an existing file, got missing.yaml"),
        (["run", "."], "preset must be a known one or a file, got '.'"),
        (["run", "--set", "recipe.kepe=0.1"], "recipe: key must be a known one, got 'kepe'; did you mean keep"),
        (["run", "--set", "recipe.keep=7"], "recipe.keep must be a fraction > 0 and ≤ 1, got 7"),
        (["run", "--method", "magic"], "recipe.method must be one of 'hgnp', 'taylor', "),
        (
            ["run", "--method", "hybrid"],
            "recipe.threshold must be a fraction from 0 to 1 with method 'hybrid', got None",
        ),
        (["run", "--set", "recipe.threshold=0.5"], "recipe.threshold must be None with method 'hgnp', got 0.5"),
        (["run", "--data", "x"], "--data must be omitted for digits, which takes no folder, got x"),
        (["run", "--device", "abacus"], "device must be one that PyTorch can use here, got abacus"),
        (["presets", "dem"], "preset must be a known one, got 'dem'; did you mean demo"),
    ],
)
def test_bad_arguments_of_a_command_are_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hgnp: ")
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def caught(action: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as info:  # noqa: PT011 - any will do
        action()
    return info.value


def test_only_what_hgnp_raises_on_purpose_is_the_users_mistake() -> None:
    refused = caught(lambda: Recipe(keep=3))
    assert exit_code(refused) == (2, "keep must be a fraction > 0 and ≤ 1, got 3")
    nobody_raised = caught(lambda: len(3))  # type: ignore[arg-type]
    assert isinstance(nobody_raised, TypeError)
    assert exit_code(nobody_raised) is None
    assert exit_code(caught(lambda: int("x"))) is None
    assert exit_code(caught(lambda: 1 / 0)) is None
    assert exit_code(PermissionError(13, "Permission denied", "/x")) == (2, "/x: Permission denied")
    assert exit_code(OSError(5, "Input/output error")) == (1, "Input/output error")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["presets"], ["run", "--help"], ["data", "--help"], ["weights", "--help"]]
)
def test_help_and_presets_do_not_wait_for_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom hgnp.cli import app\n"
        f"try:\n    app({arguments})\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\nassert 'numpy' not in sys.modules, 'numpy was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_runs_do_not_wait_for_scikit_learn_unless_they_need_it() -> None:
    code = (
        "import sys\nimport hgnp.experiments.data, hgnp.reporting.page.run_page, hgnp.train\n"
        "assert 'sklearn' not in sys.modules, 'scikit-learn was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "hgnp"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: hgnp")
