"""`Config`: everything that defines a run, as YAML. Read, validated, overridden from the command line, written.

This module imports neither torch nor anything that a configuration names: `experiments.build` builds the objects.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hgnp.errors import InputError, did_you_mean
from hgnp.experiments import safe_yaml
from hgnp.io.atomic import write


@dataclass(frozen=True, kw_only=True)
class Config:
    """The keys of a configuration file. An import path is `package.module:name`."""

    model: str
    """Import path of a callable that builds the network, or a built-in name such as `DigitsNet`."""
    data: str
    """Import path of a callable that returns (train, val) or an object with both as attributes, or a built-in name."""
    recipe: Mapping[str, Any]
    """Fields of `hgnp.Recipe`."""
    name: str = "run"
    """Name of the run. Default: the name of the preset or file."""
    about: str | None = None
    """A description."""
    model_args: Mapping[str, Any] = field(default_factory=dict)
    data_args: Mapping[str, Any] = field(default_factory=dict)
    """`--data` sets `folder` in it."""
    weights: str | None = None
    """A safetensors file of initial weights. Layers of another shape, such as a new last layer, are initialised at random."""
    loss: str | None = None
    """Import path of loss(output, target) → a scalar, or of a class of such losses. Default: cross-entropy."""
    loss_args: Mapping[str, Any] = field(default_factory=dict)
    metric: str | None = None
    """Import path of metric(output, target), higher is better, or of an object with `update`, `compute` and `reset`, or of its
    class. Default: accuracy."""
    metric_args: Mapping[str, Any] = field(default_factory=dict)
    output: str | None = None
    """The part of the network's output that the loss takes: an attribute's name (`logits`) or the import path of a function."""
    unpack: str | None = None
    """Import path of unpack(batch) → (inputs, target)."""
    optimizer: str | None = None
    """Import path such as torch.optim:AdamW; Default: SGD with the recipe's settings."""
    optimizer_args: Mapping[str, Any] = field(default_factory=dict)
    scheduler: str | None = None
    scheduler_args: Mapping[str, Any] = field(default_factory=dict)
    accumulate: int | None = None
    """Batches per step of the optimizer. Default: 1."""
    protect: tuple[str, ...] = ()
    """Names of layers that are not pruned."""
    seed: int = 0
    """Seeds model, data and run."""
    device: str | None = None
    """cpu, cuda, cuda:1, … Default: cuda if available."""
    import_from: str | None = None
    """Another folder to import from, besides the current one. Default: the folder of the configuration file."""
    methods: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """method → {recipe: overrides}, applied by `--method`."""

    @classmethod
    def from_dict(cls, values: Any, *, where: str, name: str) -> "Config":
        if not isinstance(values, Mapping):
            raise InputError(f"{where} must be a mapping with model, data and recipe, got {values!r}")
        for key in values:
            if key not in KEYS:
                raise InputError(f"{where}: key must be a known one, got {key!r}{did_you_mean(key, KEYS)}")
        for key in ("model", "data", "recipe"):
            if values.get(key) is None:
                raise InputError(f"{where}: {key} must be {_EXPECTED[key]}, got none")
        given = {key: value for key, value in values.items() if value is not None}
        for key, value in given.items():
            if not _fits(key, value):
                raise InputError(f"{where}: {key} must be {_EXPECTED[key]}, got {value!r}")
        for method, changes in given.get("methods", {}).items():
            if (
                not isinstance(changes, Mapping)
                or list(changes) != ["recipe"]
                or not isinstance(changes["recipe"], Mapping)
            ):
                raise InputError(f"{where}: methods.{method} must be recipe: {{field: value}}, got {changes!r}")
        if "protect" in given:
            given["protect"] = tuple(given["protect"])
        return cls(**{"name": name, **given})

    def as_dict(self) -> dict[str, Any]:
        """The keys that are set, in reading order, as YAML types."""
        first = ["name", "about"]
        values = {key: getattr(self, key) for key in [*first, *(key for key in KEYS if key not in first)]}
        values["protect"] = list(self.protect)
        return {key: value for key, value in values.items() if value not in (None, {}, [])}

    def settings(self) -> dict[str, Any]:
        """The settings that determine a run's result, by dotted name: without name, device and data folder."""
        flat: dict[str, Any] = {}
        for key, value in self.as_dict().items():
            if key not in ("name", "about", "device", "import_from", "methods"):
                inner = isinstance(value, Mapping)
                flat |= {f"{key}.{name}": each for name, each in value.items()} if inner else {key: value}
        flat.pop("data_args.folder", None)
        return flat

    def with_method(self, method: str) -> "Config":
        """The configuration with another method and the overrides under `methods` for it."""
        overrides = self.methods.get(method, {}).get("recipe", {})
        own = {name: value for name, value in self.recipe.items() if name != "threshold" or method == "hybrid"}
        return dataclasses.replace(self, recipe={**own, **overrides, "method": method}, methods={})

    def with_settings(self, settings: Iterable[str]) -> "Config":
        """The configuration with overrides such as "recipe.mu=0.01": a dotted path and a YAML value."""
        values = self.as_dict()
        for setting in settings:
            path, equals, text = setting.partition("=")
            if not equals or not path:
                raise InputError(f"--set must be KEY=VALUE, such as recipe.mu=0.01, got {setting!r}")
            _set(values, path.split("."), safe_yaml.load(text, where=f"--set {path}: {text[:100]!r}"))
        return Config.from_dict(values, where="command line", name=self.name)

    def write(self, file: Path) -> None:
        """Write the configuration atomically; `hgnp run FILE` repeats the run."""
        write(file, self.text())

    def text(self) -> str:
        return str(yaml.safe_dump(self.as_dict(), sort_keys=False, allow_unicode=True, width=120))


KEYS = tuple(each.name for each in dataclasses.fields(Config))
_MAPPINGS = (
    "recipe", "model_args", "data_args", "loss_args", "metric_args", "optimizer_args", "scheduler_args", "methods",
)  # fmt: skip
_EXPECTED = {
    **dict.fromkeys(KEYS, "text"),
    **dict.fromkeys(_MAPPINGS, "a mapping of names to values"),
    **dict.fromkeys(
        ("loss", "metric", "unpack", "optimizer", "scheduler"), "an import path such as package.module:name"
    ),
    "model": "an import path such as package.module:Net or a built-in name",
    "data": "an import path such as package.module:loaders or a built-in name",
    "output": "an attribute's name such as logits or an import path",
    "accumulate": "an integer ≥ 1",
    "protect": "a list of layer names",
    "seed": "an integer from 0 to 4294967295",
    "name": "text without slashes, as it names the run's folder",
}


def read(file: Path) -> Config:
    """The configuration in a YAML file. Modules beside it can be imported."""
    config = Config.from_dict(safe_yaml.read(file), where=str(file), name=file.stem)
    return config if config.import_from else dataclasses.replace(config, import_from=str(file.parent.resolve()))


def parse(text: str, *, where: str, name: str) -> Config:
    """The configuration in a YAML text; `where` names the source in messages, `name` is the default name."""
    return Config.from_dict(safe_yaml.load(text, where=where), where=where, name=name)


def extended(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`base` updated with `own`; mappings such as `recipe` are merged key by key."""
    both = [key for key in _MAPPINGS if base.get(key) and own.get(key)]
    return {**base, **own, **{key: {**base[key], **own[key]} for key in both}}


def _fits(key: str, value: Any) -> bool:
    if key in _MAPPINGS:
        return isinstance(value, Mapping) and all(isinstance(each, str) for each in value)
    if key == "protect":
        return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
    if key == "accumulate":
        return isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if key == "seed":
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32
    if key == "name":
        return isinstance(value, str) and value not in ("", ".", "..") and not set(value) & set("/\\\0")
    return isinstance(value, str)


def _set(values: dict[str, Any], path: list[str], value: Any) -> None:
    """Set `value` at `path`, copying mappings that are shared with other configurations."""
    head, *rest = path
    if head not in KEYS:
        raise InputError(f"--set: key must be a known one, got {head!r}{did_you_mean(head, KEYS)}")
    if not rest:
        values[head] = value
        return
    if head not in _MAPPINGS:
        raise InputError(f"--set: {head} must be {_EXPECTED[head]}, got {'.'.join(rest)!r} inside it")
    inner = values[head] = dict(values.get(head, {}))
    for depth, part in enumerate(rest[:-1], start=2):
        below = inner.get(part, {})
        if not isinstance(below, Mapping):
            where = ".".join(path[:depth])
            raise InputError(f"--set: {where} must be a mapping, got {below!r}; set {where}={{{rest[-1]}: …}}")
        inner[part] = dict(below)
        inner = inner[part]
    inner[rest[-1]] = value
