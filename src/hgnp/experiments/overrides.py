"""From the arguments of a command to a configuration: a preset or a file with overrides; and how a run's own differs."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hgnp.errors import InputError, did_you_mean, one_line
from hgnp.experiments import presets
from hgnp.experiments.config import Config, read
from hgnp.recipe import Recipe


def resolve_config(
    what: str, *, data: str | None, method: str | None, settings: Iterable[str], seed: int | None, device: str | None
) -> Config:
    """The preset or file `what` with the overrides of the command line: the method, then the data, then `settings`."""
    if what in presets.names():
        config = presets.preset(what)
    elif Path(what).is_file():
        config = read(Path(what))
    elif what.endswith((".yaml", ".yml")):
        raise FileNotFoundError(f"configuration must be an existing file, got {what}")
    else:
        raise InputError(f"preset must be a known one or a file, got {what!r}{did_you_mean(what, presets.names())}")
    if method is not None:
        config = config.with_method(method)
    if data is not None:
        config = dataclasses.replace(config, data_args={**config.data_args, "folder": data})
    config = config.with_settings(settings)
    given = {key: value for key, value in {"seed": seed, "device": device}.items() if value is not None}
    return config.with_settings([f"{key}={json.dumps(value)}" for key, value in given.items()])


def recipe_of(config: Config) -> Recipe:
    """The configuration's recipe, validated."""
    if config.recipe.get("seed", config.seed) != config.seed:
        raise InputError(
            f"recipe.seed must equal seed or be left out, got {config.recipe['seed']!r}; set seed, which seeds the whole run"
        )
    try:
        return Recipe.from_dict({**config.recipe, "seed": config.seed})
    except ValueError as error:
        message = one_line(error)
        raise InputError(message if message.startswith("recipe") else f"recipe.{message}") from error


def with_complete_recipe(config: Config) -> Config:
    """The configuration with every field of its recipe, as a run writes it."""
    fields = recipe_of(config).as_dict()
    return dataclasses.replace(config, recipe={name: value for name, value in fields.items() if name != "seed"})


def first_difference(config: Config, folder: Path) -> tuple[str, Any, Any] | None:
    """The first setting, by its dotted name, in which a run's config.yaml differs from `config`, with `config`'s value and
    the run's. None if there is none. Device and data folder may differ. Omitted fields of the recipe have their
    defaults."""
    file = folder / "config.yaml"
    try:
        before, now = with_complete_recipe(read(file)).settings(), with_complete_recipe(config).settings()
    except ValueError as error:
        named = one_line(error)
        raise InputError(named if named.startswith(str(file)) else f"{file}: {named}") from error
    for key in [*now, *before]:
        if before.get(key) != now.get(key):
            return key, now.get(key), before.get(key)
    return None
