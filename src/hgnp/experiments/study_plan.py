"""Study files: networks × methods × seeds, and the runs that they define. Runs nothing and needs no torch.

name: mine
networks: [vgg16-cifar10-fast, my.yaml]
methods:
  hgnp: {}
  taylor: {set: {recipe.method: taylor}}     # at the network's own schedule
  taylor-paper: {method: taylor}             # as --method taylor: with the schedule that the configuration has for it
seeds: 3
set: {recipe.snapshots: [0.144, 0.1]}
"""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hgnp.errors import InputError, did_you_mean, one_line
from hgnp.experiments import presets, safe_yaml
from hgnp.experiments.config import Config
from hgnp.experiments.overrides import first_difference, resolve_config, with_complete_recipe

MAX_RUNS = 1000
PlannedState = Literal["new", "unfinished", "finished"]
RESULTS = Path("results")
KEYS = ("name", "about", "networks", "methods", "seeds", "set", "baseline", "out")
NETWORK_KEYS, METHOD_KEYS = ("config", "name", "data", "set"), ("method", "set")


@dataclass(frozen=True)
class StudyNetwork:
    """A preset or a configuration file with the study's overrides."""

    config: str
    name: str | None = None
    """Part of its runs' names. Default: the configuration's name."""
    data: str | None = None
    """The folder of its data. Default: `--data`."""
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class StudyMethod:
    """One method of a study: `hgnp run` with `--method` (if any) and `--set`."""

    name: str
    method: str | None
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedRun:
    """One run: the arguments of `hgnp run` and the resulting configuration."""

    name: str
    """The name of its folder."""
    network: str
    method: str
    """Its name in the study."""
    seed: int
    arguments: tuple[str, ...]
    config: Config

    def command(self, out: Path) -> list[str]:
        return ["run", *self.arguments, "--out", str(out / self.name), "--resume"]

    def state(self, out: Path) -> PlannedState:
        """Whether the run exists in `out`. InputError for a folder with a run of another configuration."""
        folder = out / self.name
        if not (folder / "run.json").exists():
            return "new"
        if not (folder / "config.yaml").exists():
            raise InputError(
                f"{folder} must hold a run of hgnp run, got one without config.yaml; choose another --out or move it away"
            )
        differs = first_difference(self.config, folder)
        if differs is not None:
            key, now, before = differs
            raise InputError(
                f"{folder} must have been run with {key}={now!r} as in the study, got {before!r}; "
                f"choose another --out, or move the folder away to run it again"
            )
        return "finished" if (folder / "result.json").exists() else "unfinished"


@dataclass(frozen=True)
class StudyPlan:
    """The keys of a study file, validated."""

    name: str
    networks: tuple[StudyNetwork, ...]
    methods: tuple[StudyMethod, ...]
    seeds: tuple[int, ...] = (0,)
    settings: tuple[str, ...] = ()
    about: str | None = None
    baseline: str | None = None
    """The method that the others are compared with. Default: Taylor, else the first."""
    out: Path | None = None

    @classmethod
    def from_dict(cls, values: Any, *, where: str, name: str, folder: Path | None = None) -> "StudyPlan":
        """`where` names the source in messages; configuration files are relative to `folder`."""
        if not isinstance(values, Mapping):
            raise InputError(f"{where} must be a mapping with networks and methods, got {values!r}")
        _known(values, KEYS, where)
        for key in ("networks", "methods"):
            if not values.get(key):
                raise InputError(f"{where}: {key} must be given, got none; for example {_EXAMPLES[key]}")
        for key in ("name", "about", "baseline", "out"):
            if not isinstance(values.get(key), str | None):
                raise InputError(f"{where}: {key} must be text, got {values[key]!r}")
        if "\0" in (values.get("out") or ""):
            raise InputError(f"{where}: out must be the path of a folder, got {values['out']!r}")
        given = values["networks"]
        networks = given if isinstance(given, list) else [given]
        plan = cls(
            name=_name(values.get("name") or name, f"{where}: name"),
            networks=tuple(_network(each, where, folder) for each in networks),
            methods=_methods(values["methods"], where),
            seeds=_seeds(values.get("seeds", 1), f"{where}: seeds"),
            settings=_settings(values.get("set"), f"{where}: set"),
            about=values.get("about"),
            baseline=values.get("baseline"),
            out=Path(values["out"]) if values.get("out") else None,
        )
        names = [method.name for method in plan.methods]
        if plan.baseline is not None and plan.baseline not in names:
            known = did_you_mean(plan.baseline, names)
            raise InputError(f"{where}: baseline must be one of the methods, got {plan.baseline!r}{known}")
        return plan

    def runs(
        self,
        *,
        data: str | None = None,
        device: str | None = None,
        settings: Sequence[str] = (),
        seeds: Sequence[int] | None = None,
        methods: Sequence[str] | None = None,
    ) -> list[PlannedRun]:
        """Every run, the methods of a seed one after the other; `settings` come last and win. `seeds` and `methods` replace
        and choose from those of the file."""
        if data is not None and all(network.data is not None for network in self.networks):
            raise InputError(f"--data must be left out, got {data!r}: each network of the study has its own data")
        names = [method.name for method in self.methods]
        for name in methods or ():
            if name not in names:
                raise InputError(f"--methods must be methods of the study, got {name!r}{did_you_mean(name, names)}")
        chosen = [method for method in self.methods if methods is None or method.name in methods]
        seeds = self.seeds if seeds is None else seeds
        count = len(self.networks) * len(seeds) * len(chosen)
        if count > MAX_RUNS:
            raise InputError(f"{self.name}: a study must have at most {MAX_RUNS:,} runs, got {count:,}")
        made = [
            self._run(network, method, seed, data, device, settings)
            for network, seed, method in itertools.product(self.networks, seeds, chosen)
        ]
        for number, run in enumerate(made):
            if any(run.name == other.name for other in made[:number]):
                raise InputError(
                    f"{self.name}: runs must have distinct names, got {run.name} twice; "
                    "give networks a name (networks: [{config: …, name: …}])"
                )
        return made

    def _run(
        self,
        network: StudyNetwork,
        method: StudyMethod,
        seed: int,
        data: str | None,
        device: str | None,
        settings: Sequence[str],
    ) -> PlannedRun:
        folder = network.data if network.data is not None else data
        changes = [*self.settings, *network.settings, *method.settings, *settings]
        try:
            config = with_complete_recipe(
                resolve_config(
                    network.config, data=folder, method=method.method, settings=changes, seed=seed, device=device
                )
            )
        except ValueError as error:
            raise InputError(f"{self.name}: {method.name} on {network.config}: {one_line(error)}") from error
        options = {"--data": folder, "--method": method.method, "--seed": str(seed), "--device": device}
        arguments = [network.config]
        for option, value in options.items():
            arguments += [] if value is None else [option, value]
        for change in changes:
            arguments += ["--set", change]
        name = network.name or _name(config.name, f"{self.name}: the name of {network.config}")
        return PlannedRun(f"{name}-{method.name}-{seed}", name, method.name, seed, tuple(arguments), config)


_EXAMPLES = {"networks": "networks: [vgg16-cifar10-fast]", "methods": "methods: [hgnp, taylor]"}


def read(file: Path) -> StudyPlan:
    """The study in a YAML file. Configuration files are relative to it."""
    return StudyPlan.from_dict(safe_yaml.read(file), where=str(file), name=file.stem, folder=file.parent)


def check_seeds(text: str) -> tuple[int, ...]:
    """Seeds from the command line, such as 0,1,2."""
    parts = [part.strip() for part in text.split(",")]
    given = [int(part) if part.isdecimal() and len(part) < 11 else part for part in parts]
    return _seeds(given, "--seeds")


def _known(values: Mapping[Any, Any], keys: Sequence[str], where: str) -> None:
    for key in values:
        if key not in keys:
            raise InputError(f"{where}: key must be a known one, got {key!r}{did_you_mean(key, keys)}")


def _name(name: Any, where: str) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}", name):
        raise InputError(f"{where} must be letters, digits and . _ + -, as it names folders, got {name!r}")
    return name


def _network(given: Any, where: str, folder: Path | None) -> StudyNetwork:
    values = {"config": given} if isinstance(given, str) else given
    if not isinstance(values, Mapping) or not isinstance(values.get("config"), str):
        raise InputError(
            f"{where}: a network must be a preset, a file or {{config: …, name: …, data: …, set: …}}, got {given!r}"
        )
    _known(values, NETWORK_KEYS, f"{where}: networks")
    if not isinstance(values.get("data"), str | None):
        raise InputError(f"{where}: networks: data must be a folder, got {values['data']!r}")
    name = None if values.get("name") is None else _name(values["name"], f"{where}: networks: name")
    config = values["config"]
    if folder is not None and config not in presets.names() and (folder / config).is_file():
        config = str(folder / config)
    return StudyNetwork(config, name, values.get("data"), _settings(values.get("set"), f"{where}: networks: set"))


def _methods(given: Any, where: str) -> tuple[StudyMethod, ...]:
    if isinstance(given, str):
        given = [given]
    if isinstance(given, list):
        if len({str(each) for each in given}) < len(given):
            raise InputError(f"{where}: methods must differ, got {given!r}")
        given = {each if isinstance(each, str) else str(each): {"method": each} for each in given}
    if not isinstance(given, Mapping):
        raise InputError(
            f"{where}: methods must be a list or a mapping of names to {{method: …, set: …}}, got {given!r}"
        )
    made = []
    for name, values in given.items():
        place = f"{where}: methods.{name}"
        _name(name, f"{place}: the name")
        values = {} if values is None else values
        if not isinstance(values, Mapping):
            raise InputError(f"{place} must be {{method: …, set: …}}, got {values!r}")
        _known(values, METHOD_KEYS, place)
        if not isinstance(values.get("method"), str | None):
            raise InputError(f"{place}: method must be text, got {values['method']!r}")
        made.append(StudyMethod(name, values.get("method"), _settings(values.get("set"), f"{place}: set")))
    return tuple(made)


def _seeds(given: Any, where: str) -> tuple[int, ...]:
    """`given`: a list of seeds, or their number."""
    if isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= MAX_RUNS:
        return tuple(range(given))
    fits = isinstance(given, list) and given and all(type(seed) is int and 0 <= seed < 2**32 for seed in given)
    if not fits or len(set(given)) < len(given):
        kind = "a list of different integers from 0 to 4294967295"
        also = "" if where.startswith("--") else f", or how many from 1 to {MAX_RUNS}"
        shown = ",".join(map(str, given)) if also == "" else given
        raise InputError(f"{where} must be {kind}{also}, got {shown!r}")
    return tuple(given)


def _settings(given: Any, where: str) -> tuple[str, ...]:
    """A mapping such as {recipe.mu: 0} as lines for `--set`."""
    if given is None:
        return ()
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise InputError(f"{where} must be a mapping such as {{recipe.mu: 0.01}}, got {given!r}")
    try:
        return tuple(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items())
    except TypeError:
        raise InputError(f"{where} must hold numbers, texts, lists and mappings, got {given!r}") from None


def check_states(planned: Iterable[PlannedRun], out: Path) -> dict[str, PlannedState]:
    """Each run's name and state; InputError for a folder with another run, before anything runs."""
    for name in ("run.json", "config.yaml"):
        if (out / name).exists():
            raise InputError(f"--out must be a folder for a study's runs, got {out}, which holds a run; choose another")
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"--out must be a folder, got {out}, which is a file; choose another")
    return {run.name: run.state(out) for run in planned}
