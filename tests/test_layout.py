"""Dependencies point one way: between packages as CONTRIBUTING.md lists them, and between the files of a package."""

import ast
import re
import subprocess
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "hgnp"
FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(file): file for file in FILES}


def parsed(file: Path) -> ast.Module:
    """The file's syntax tree, without the imports that only a type checker runs."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    return tree


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """The modules of hgnp that a tree imports, by their full names. `package` resolves relative imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                found = submodule if submodule in MODULES else source
                if found in MODULES:
                    yield found


def package_of(file: Path) -> str:
    return module_name(file if file.name == "__init__.py" else file.parent)


def imports(file: Path) -> set[str]:
    return set(imported(parsed(file), package_of(file)))


def listed() -> list[list[str]]:
    """The entries under src/hgnp in their order; a line may have several files."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    lines = text.split("src/hgnp/\n")[1].split("\ntests/")[0].splitlines()
    entries = [line for line in lines if re.match(r"  \w", line)]
    return [re.findall(r"(?<![\w/])(\w+)(?:\.py|/)", entry) for entry in entries]


def test_an_entry_imports_only_from_those_above_it() -> None:
    units = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    units -= {"__init__", "__main__"}
    above: set[str] = set()
    for names in listed():
        here = set(names) & units
        assert here, f"CONTRIBUTING.md lists {names}, none of which exists"
        above |= here
        for name in here:
            folder = PACKAGE / name
            for file in folder.rglob("*.py") if folder.is_dir() else [PACKAGE / f"{name}.py"]:
                entries = {each.split(".")[1] for each in imports(file) if "." in each}
                below = entries & units - above
                assert not below, (
                    f"{file.relative_to(ROOT)} imports {sorted(below)}, which CONTRIBUTING.md lists below it"
                )
    assert above == units, f"CONTRIBUTING.md does not list {sorted(units - above)}"


def test_imports_between_files_have_no_cycle() -> None:
    graph = {name: imports(file) - {name} for name, file in MODULES.items()}
    assert sum(map(len, graph.values())) > len(MODULES)
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"files import each other: {' imports '.join(reversed(error.args[1]))}")


def test_no_function_imports_from_hgnp() -> None:
    """Such an import can hide a cycle. The commands may: they import torch only when they need it, to start quickly."""
    functions = [
        (file, node)
        for file in FILES
        if file.relative_to(PACKAGE).parts[0] != "cli"
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert len(functions) > 1000
    for file, node in functions:
        found = sorted(set(imported(node, package_of(file))))
        assert not found, f"{file.relative_to(ROOT)}:{node.lineno} imports {found}; import it at the top of the file"


def test_no_two_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for name, file in MODULES.items():
        for node in parsed(file).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name)
    assert len(homes) > 100
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names() -> set[str]:
    """The private attributes, functions and classes of hgnp."""
    nodes = [node for file in FILES for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    stored = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return {name for name in stored | defined if is_private(name)}


def test_tests_use_no_private_attribute() -> None:
    """Not by name either, as in `monkeypatch.setattr(trainer, "_check", …)`."""
    private, found = private_names(), []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hgnp"):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
                texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
                names = [text.rpartition(".")[2] for text in texts if isinstance(text, str)]
            found += [f"{file.relative_to(ROOT)}:{node.lineno}: {name}" for name in names if name in private]
    assert found == []


def test_the_repository_has_no_weights_and_no_run_outside_of_results() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("needs the repository's list of files")
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    files = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split("\0")
    assert not [name for name in files if name.endswith((".safetensors", ".pt", ".pth", ".onnx"))]
    runs = [name for name in files if Path(name).name in ("run.json", "result.json", "metrics.jsonl")]
    assert not [name for name in runs if not name.startswith("results/")]
