"""Studies that come with hgnp: the paper's four experiments, literal and fast, our best
recipes and their rivals on CIFAR-10, and one on handwritten digits."""

from importlib import resources
from pathlib import Path

from hgnp.errors import InputError, did_you_mean
from hgnp.experiments import safe_yaml
from hgnp.experiments.study_plan import StudyPlan, read

ENDING = ".yaml"


def names() -> list[str]:
    """Every study, the demo first."""
    files = [each.name for each in resources.files(__name__).iterdir()]
    return sorted(
        (name.removesuffix(ENDING) for name in files if name.endswith(ENDING)), key=lambda n: (n != "demo", n)
    )


def study(name: str) -> StudyPlan:
    text = resources.files(__name__).joinpath(name + ENDING).read_text(encoding="utf-8")
    return StudyPlan.from_dict(safe_yaml.load(text, where=f"study {name}"), where=f"study {name}", name=name)


def find(what: str) -> StudyPlan:
    """A study that comes with hgnp, by its name, or the one in a file."""
    if what in names():
        return study(what)
    if Path(what).is_file():
        return read(Path(what))
    if what.endswith((".yaml", ".yml")):
        raise FileNotFoundError(f"study must be an existing file, got {what}")
    raise InputError(f"study must be a known one or a file, got {what!r}{did_you_mean(what, names())}")
