"""Dependencies point one way, as CONTRIBUTING.md has them."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def listed() -> list[list[str]]:
    """The entries under src/hgnp in their order; a line may have several files."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    lines = text.split("src/hgnp/\n")[1].split("\ntests/")[0].splitlines()
    entries = [line for line in lines if re.match(r"  \w", line)]
    return [re.findall(r"(?<![\w/])(\w+)(?:\.py|/)", entry) for entry in entries]


def imports(file: Path) -> set[str]:
    """What a file imports of hgnp, by the first part of its name; what is imported for types alone is left out."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "hgnp":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return found


def test_an_entry_imports_only_from_those_above_it() -> None:
    package = ROOT / "src" / "hgnp"
    units = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    units -= {"__init__", "__main__"}
    above: set[str] = set()
    for names in listed():
        here = set(names) & units
        assert here, f"CONTRIBUTING.md lists {names}, none of which is there"
        above |= here
        for name in here:
            folder = package / name
            files = folder.rglob("*.py") if folder.is_dir() else [package / f"{name}.py"]
            for file in files:
                behind = imports(file) & units - above
                assert not behind, (
                    f"{file.relative_to(ROOT)} imports {sorted(behind)}, which CONTRIBUTING.md has below it"
                )
    assert above == units, f"CONTRIBUTING.md does not list {sorted(units - above)}"
