"""Configurations that come with hgnp: the demo, the paper's four experiments (literal, fast and short) and its
ablations, and our best recipes.

A preset may `extend` another: its own keys override those of the other, in mappings such as `recipe` key by key.
"""

from importlib import resources
from typing import Any

from hgnp.errors import InputError, did_you_mean
from hgnp.experiments import safe_yaml
from hgnp.experiments.config import Config, extended

ENDING, EXTENDS = ".yaml", "extends"


def names() -> list[str]:
    """Every preset, the demo first."""
    files = [each.name for each in resources.files(__name__).iterdir()]
    return sorted(
        (name.removesuffix(ENDING) for name in files if name.endswith(ENDING)), key=lambda n: (n != "demo", n)
    )


def text(name: str) -> str:
    """A preset's YAML, whole: comments and all, unless it extends another."""
    own = _file(name)
    return preset(name).text() if EXTENDS in safe_yaml.load(own, where=name) else own


def preset(name: str) -> Config:
    return Config.from_dict(_resolved(name), where=f"preset {name}", name=name)


def _resolved(name: str) -> dict[str, Any]:
    own = dict(safe_yaml.load(_file(name), where=f"preset {name}"))
    return extended(_resolved(own.pop(EXTENDS)), own) if EXTENDS in own else own


def _file(name: str) -> str:
    if name not in names():
        raise InputError(f"preset must be a known one, got {name!r}{did_you_mean(name, names())}")
    return resources.files(__name__).joinpath(name + ENDING).read_text(encoding="utf-8")
