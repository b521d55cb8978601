"""Configurations that come with hgnp: the demo, the paper's four experiments and its ablations."""

from importlib import resources

from hgnp.experiments.config import Config, parse
from hgnp.messages import meant

ENDING = ".yaml"


def names() -> list[str]:
    """Every preset, the demo first."""
    files = [each.name for each in resources.files(__name__).iterdir()]
    return sorted(
        (name.removesuffix(ENDING) for name in files if name.endswith(ENDING)), key=lambda n: (n != "demo", n)
    )


def text(name: str) -> str:
    """A preset's YAML, comments and all."""
    if name not in names():
        raise ValueError(f"there is no preset {name!r}{meant(name, names())}")
    return resources.files(__name__).joinpath(name + ENDING).read_text(encoding="utf-8")


def preset(name: str) -> Config:
    return parse(text(name), where=f"preset {name}", name=name)
