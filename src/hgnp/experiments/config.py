"""A configuration: everything a run is made from, as YAML. Read, checked, changed from the command line, written again.

Nothing is imported on behalf of the configuration here, and torch is not needed: `experiments.build` makes the objects.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hgnp.errors import InputError, meant
from hgnp.experiments import safe_yaml
from hgnp.io.atomic import write


@dataclass(frozen=True, kw_only=True)
class Config:
    """The keys of a configuration file. An import path is `package.module:name`."""

    model: str
    """Import path of a callable that makes the network, or a built-in name such as `DigitsNet`."""
    data: str
    """Import path of a callable that returns (train, val) or an object with both as attributes, or a built-in name."""
    recipe: Mapping[str, Any]
    """Fields of `hgnp.Recipe`."""
    name: str = "run"
    """What the run is called; the preset's or the file's name unless it is set."""
    about: str | None = None
    """A line or two for the reader."""
    model_args: Mapping[str, Any] = field(default_factory=dict)
    data_args: Mapping[str, Any] = field(default_factory=dict)
    """`folder` in it is what `--data` sets."""
    weights: str | None = None
    """A safetensors file that the network starts from; layers of another shape, such as a new last layer, start fresh."""
    loss: str | None = None
    """Import path of loss(output, target) → a scalar, or of a class that makes one; cross-entropy if left out."""
    loss_args: Mapping[str, Any] = field(default_factory=dict)
    metric: str | None = None
    """Import path of metric(output, target), higher is better; accuracy if left out."""
    output: str | None = None
    """What of the network's output the loss takes: an attribute's name (`logits`) or the import path of a function."""
    unpack: str | None = None
    """Import path of unpack(batch) → (inputs, target)."""
    optimizer: str | None = None
    """Import path such as torch.optim:AdamW; SGD as the recipe says if left out."""
    optimizer_args: Mapping[str, Any] = field(default_factory=dict)
    scheduler: str | None = None
    scheduler_args: Mapping[str, Any] = field(default_factory=dict)
    protect: tuple[str, ...] = ()
    """Layers that are left whole."""
    seed: int = 0
    """Seeds model, data and run."""
    device: str | None = None
    """cpu, cuda, cuda:1 …; cuda where there is one if left out."""
    import_from: str | None = None
    """A folder whose modules can be imported, besides the current one: that of the configuration's file unless it is set."""
    methods: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """method → {recipe: fields that it wants otherwise}, applied by `--method`."""

    @classmethod
    def from_dict(cls, values: Any, *, where: str, name: str) -> "Config":
        if not isinstance(values, Mapping):
            raise InputError(f"{where} must be a mapping with model, data and recipe, got {values!r}")
        for key in values:
            if key not in KEYS:
                raise InputError(f"{where}: there is no key {key!r}{meant(key, KEYS)}")
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
        """The keys that are set, in the order a reader wants, in types that YAML has."""
        first = ["name", "about"]
        values = {key: getattr(self, key) for key in [*first, *(key for key in KEYS if key not in first)]}
        values["protect"] = list(self.protect)
        return {key: value for key, value in values.items() if value not in (None, {}, [])}

    def settings(self) -> dict[str, Any]:
        """What makes a run what it is, by dotted names: not what it is called, where it runs and where its data lies."""
        flat: dict[str, Any] = {}
        for key, value in self.as_dict().items():
            if key not in ("name", "about", "device", "import_from", "methods"):
                inner = isinstance(value, Mapping)
                flat |= {f"{key}.{name}": each for name, each in value.items()} if inner else {key: value}
        flat.pop("data_args.folder", None)
        return flat

    def with_method(self, method: str) -> "Config":
        """The same experiment by another method, with the hyperparameters that the configuration has for it."""
        overrides = self.methods.get(method, {}).get("recipe", {})
        own = {name: value for name, value in self.recipe.items() if name != "threshold" or method == "hybrid"}
        return dataclasses.replace(self, recipe={**own, **overrides, "method": method}, methods={})

    def with_settings(self, settings: Iterable[str]) -> "Config":
        """Changed by lines such as "recipe.mu=0.01": a dotted path and a value in YAML."""
        values = self.as_dict()
        for setting in settings:
            path, equals, text = setting.partition("=")
            if not equals or not path:
                raise InputError(f"--set must be KEY=VALUE, such as recipe.mu=0.01, got {setting!r}")
            _set(values, path.split("."), safe_yaml.load(text, where=f"--set {path}: {text[:100]!r}"))
        return Config.from_dict(values, where="command line", name=self.name)

    def write(self, file: Path) -> None:
        """Whole or not at all; `hgnp run FILE` runs it again."""
        write(file, self.text())

    def text(self) -> str:
        return str(yaml.safe_dump(self.as_dict(), sort_keys=False, allow_unicode=True, width=120))


KEYS = tuple(each.name for each in dataclasses.fields(Config))
_MAPPINGS = ("recipe", "model_args", "data_args", "loss_args", "optimizer_args", "scheduler_args", "methods")
_EXPECTED = {
    **dict.fromkeys(KEYS, "text"),
    **dict.fromkeys(_MAPPINGS, "a mapping of names to values"),
    **dict.fromkeys(
        ("loss", "metric", "unpack", "optimizer", "scheduler"), "an import path such as package.module:name"
    ),
    "model": "an import path such as package.module:Net or a built-in name",
    "data": "an import path such as package.module:loaders or a built-in name",
    "output": "an attribute's name such as logits or an import path",
    "protect": "a list of layer names",
    "seed": "a whole number from 0 to 4294967295",
}


def read(file: Path) -> Config:
    """The configuration in a YAML file. Modules beside it can be imported."""
    config = Config.from_dict(safe_yaml.read(file), where=str(file), name=file.stem)
    return config if config.import_from else dataclasses.replace(config, import_from=str(file.parent.resolve()))


def parse(text: str, *, where: str, name: str) -> Config:
    """The configuration in a YAML text; `where` it stands is named in messages, `name` is what it is called by default."""
    return Config.from_dict(safe_yaml.load(text, where=where), where=where, name=name)


def extended(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `base` with `own` ones in their place; of mappings such as `recipe`, key by key."""
    both = [key for key in _MAPPINGS if base.get(key) and own.get(key)]
    return {**base, **own, **{key: {**base[key], **own[key]} for key in both}}


def _fits(key: str, value: Any) -> bool:
    if key in _MAPPINGS:
        return isinstance(value, Mapping) and all(isinstance(each, str) for each in value)
    if key == "protect":
        return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
    if key == "seed":
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32
    return isinstance(value, str)


def _set(values: dict[str, Any], path: list[str], value: Any) -> None:
    """Put `value` in place without touching the mappings that are shared with other configurations."""
    head, *rest = path
    if head not in KEYS:
        raise InputError(f"--set: there is no key {head!r}{meant(head, KEYS)}")
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
