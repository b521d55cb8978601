"""From a configuration to objects: import paths are resolved, checked and called with their arguments.

Everything is resolved and checked before anything is built, so that a mistake in the last key is found before the data loads.
"""

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from hgnp.errors import InputError, brief, did_you_mean, one_line
from hgnp.execution.process_group import device_of_rank
from hgnp.experiments.config import Config
from hgnp.experiments.models import load_weights
from hgnp.experiments.overrides import recipe_of, with_complete_recipe
from hgnp.io.runs import SAVED_START
from hgnp.io.weights import load
from hgnp.recipe import Recipe
from hgnp.train import as_device, prune_and_report
from hgnp.training import rng_state
from hgnp.training.evaluate import Accumulator

if TYPE_CHECKING:
    from hgnp import Result
    from hgnp.progress import Progress

MODELS = {name: f"hgnp.experiments.models:{name}" for name in ("AlexNet", "DigitsNet", "ResNet18", "VGG16")}
DATA = {name: f"hgnp.experiments.data:{name}" for name in ("cifar10", "cub200", "digits", "flowers102", "image_folder")}
FEATURES = ("train_samples", "val_samples", "image_side", "classes")


@dataclass(frozen=True)
class Experiment:
    """A network and its data, ready to run."""

    config: Config
    """The configuration with every field of the recipe."""
    net: nn.Module
    train: Iterable[Any]
    val: Iterable[Any] | None
    recipe: Recipe
    options: Mapping[str, Any]
    """Further arguments of `hgnp.prune`."""
    about: dict[str, Any]
    """Further entries of run.json: the run's name, its initial weights, the features of the data."""

    def run(self, *, out: Path, resume: bool, progress: "Progress") -> "Result":
        return prune_and_report(
            self.net, self.train, self.val, recipe=self.recipe, out=out, resume=resume, **self.options,
            progress=progress, about=self.about,
        )  # fmt: skip


def prepare(config: Config) -> Experiment:
    extend_import_path(config)
    recipe = recipe_of(config)
    device = str(device_of_rank(as_device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))))
    _find_built_in("model", config.model, MODELS)
    data = _find_built_in("data", config.data, DATA)
    data_args = dict(config.data_args)
    if "device" in _parameters(data):
        data_args.setdefault("device", device)
    _check_args("data_args", data, data_args)
    options = {"device": device, "protect": config.protect, **_options(config)}

    rng_state.seed(config.seed)
    net = network(config)
    start = "random weights" if config.weights is None else _load_initial_weights(net, Path(config.weights))
    loaders = _call_factory("data", data, **data_args)
    train, val = _train_and_val(config.data, loaders)
    known = {name: getattr(loaders, name, None) for name in FEATURES}
    features = {name: value for name, value in known.items() if value is not None}
    about: dict[str, Any] = {"name": config.name, "start": start, "features": features}
    if (shared_by := os.environ.get("HGNP_SHARED_BY", "1")) != "1":  # set by hgnp study
        about["shared_by"] = int(shared_by)
    return Experiment(with_complete_recipe(config), net, train, val, recipe, options, about)


def extend_import_path(config: Config) -> None:
    """Add the current folder and the configuration's own to sys.path."""
    for folder in (os.getcwd(), config.import_from):
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)


def network(config: Config) -> nn.Module:
    """Build the unpruned network."""
    model = _find_built_in("model", config.model, MODELS)
    _check_args("model_args", model, config.model_args)
    net = _call_factory("model", model, **config.model_args)
    if not isinstance(net, nn.Module):
        raise InputError(f"model must return an nn.Module, got {type(net).__name__} from {config.model}")
    return net


def find(key: str, path: str) -> Any:
    """Import the callable that an import path names."""
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name or module_name.startswith("."):
        raise InputError(f"{key} must be an import path such as package.module:name, got {path!r}")
    try:
        value = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise InputError(
                f"{key} must be the import path of a module that can be imported, got {module_name}, which needs "
                f"{error.name}; install it"
            ) from error
        raise InputError(f"{key} must be the import path of an existing module, got {path!r} without a module {error.name} in "
                         "the current folder, beside the configuration and among installed packages") from error  # fmt: skip
    except SyntaxError as error:
        raise InputError(
            f"{key} must be the import path of valid Python, got {error.filename} line {error.lineno}: {error.msg}"
        ) from error
    for part in name.split("."):
        if not hasattr(value, part):
            known = [each for each in dir(value) if not each.startswith("_")]
            raise InputError(
                f"{key} must name something in {module_name}, got {name!r}{did_you_mean(part, known) if known else ''}"
            )
        value = getattr(value, part)
    if not callable(value) and not (key == "metric" and isinstance(value, Accumulator)):
        raise InputError(f"{key} must be callable, got {path}, a {type(value).__name__}")
    return value


def _find_built_in(key: str, name: str, built_in: Mapping[str, str]) -> Any:
    if ":" not in name and name not in built_in:
        raise InputError(
            f"{key} must be a built-in or an import path, package.module:name, got {name!r}{did_you_mean(name, built_in)}"
        )
    return find(key, built_in.get(name, name))


def _options(config: Config) -> dict[str, Any]:
    options: dict[str, Any] = {} if config.accumulate is None else {"accumulate": config.accumulate}
    if config.unpack:
        options["unpack"] = find("unpack", config.unpack)
    if config.output:
        options["output"] = (
            find("output", config.output) if ":" in config.output else partial(_output_part, config.output)
        )
    for key in ("loss", "metric"):
        if path := getattr(config, key):
            options[key] = _function_or_object(key, find(key, path), getattr(config, f"{key}_args"))
    for key in ("optimizer", "scheduler"):
        if path := getattr(config, key):
            factory, args = find(key, path), getattr(config, f"{key}_args")
            _check_args(f"{key}_args", factory, args, before=1)
            options[key] = partial(_call_factory, key, factory, **args)
    for key in ("loss", "metric", "optimizer", "scheduler"):
        if not getattr(config, key) and getattr(config, f"{key}_args"):
            raise InputError(f"{key}_args must come with {key}, got them alone; set {key} to an import path")
    return options


def _function_or_object(key: str, found: Any, args: Mapping[str, Any]) -> Any:
    """A function of (output, target) with these arguments, an object of a class with them, or an object as it is."""
    if inspect.isclass(found):
        _check_args(f"{key}_args", found, args)
        return _call_factory(key, found, **args)
    if not args:
        return found
    if not callable(found):
        raise InputError(f"{key}_args must be left out for an object, got {', '.join(args)}; name its class instead")
    _check_args(f"{key}_args", found, args, before=2)
    return partial(found, **args)


def _output_part(name: str, output: Any) -> Any:
    return output[name] if isinstance(output, Mapping) else getattr(output, name)


def _parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except ValueError:  # implemented in C, without a signature
        return {"args": inspect.Parameter("args", inspect.Parameter.VAR_KEYWORD)}


def _check_args(key: str, factory: Callable[..., Any], args: Mapping[str, Any], before: int = 0) -> None:
    """Check that `factory` takes these keyword arguments, after `before` positional ones, and lacks none."""
    parameters = list(_parameters(factory).values())[before:]
    named = [each for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
    known = [each.name for each in named]
    if not any(each.kind == each.VAR_KEYWORD for each in parameters):
        for name in args:
            if (key, name) == ("data_args", "folder") and name not in known:
                raise InputError(
                    f"--data must be omitted for {_name_of(factory)}, which takes no folder, got {args[name]}"
                )
            if name not in known:
                what = did_you_mean(name, known) if known else "; it takes none"
                raise InputError(f"{key} must be arguments of {_name_of(factory)}, got {name!r}{what}")
    for each in named:
        if each.default is each.empty and each.name not in args:
            how = "--data DIR" if (key, each.name) == ("data_args", "folder") else f"--set {key}.{each.name}=…"
            raise InputError(f"{key} must have {each.name!r} for {_name_of(factory)}, got none; pass {how}")


def _call_factory(key: str, factory: Callable[..., Any], /, *before: Any, **args: Any) -> Any:
    try:
        return factory(*before, **args)
    except (TypeError, ValueError, RuntimeError) as error:  # torch raises the last for a width of -1
        raise InputError(
            f"{key}: {_name_of(factory)} must accept its arguments, but failed: {one_line(error)}"
        ) from error
    except OSError as error:
        if str(factory.__module__).startswith("hgnp."):
            raise  # hgnp's own loaders name what is missing
        raise InputError(f"{key}: {_name_of(factory)} must find its files, but failed: {brief(error)}") from error


def _name_of(factory: Callable[..., Any]) -> str:
    return getattr(factory, "__qualname__", repr(factory))


def _train_and_val(name: str, loaders: Any) -> tuple[Any, Any]:
    if hasattr(loaders, "train"):
        return loaders.train, getattr(loaders, "val", None)
    if isinstance(loaders, tuple | list) and len(loaders) == 2:
        return loaders[0], loaders[1]
    raise InputError(
        f"data must return (train, val) or an object with .train and .val, got {type(loaders).__name__} from {name}"
    )


def _load_initial_weights(net: nn.Module, file: Path) -> str:
    """Load initial weights into `net`. Returns a description of them."""
    if file.is_file() and file.suffix == ".safetensors":
        with contextlib.suppress(SafetensorError), safe_open(file, framework="pt") as opened:
            if "hgnp" in (opened.metadata() or {}):
                load(file, net)
                return f"{SAVED_START}{file}"
    return load_weights(net, file).about
