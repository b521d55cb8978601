"""A network at rounded widths is one that can be loaded and timed like the run's own."""

import sys
from pathlib import Path

from hgnp.experiments.build import prepare
from hgnp.experiments.overrides import resolve_config
from hgnp.experiments.reload import networks
from hgnp.progress import SilentProgress

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from rounded import rounded

SETTINGS = [
    "model_args.width=8", "data_args.batch=256", "recipe.warmup_epochs=0", "recipe.neurons_per_round=30", "recipe.keep=0.4",
    "recipe.finetune_epochs=0", "recipe.method=random",
]  # fmt: skip


def test_widths_are_the_nearest_multiples(tmp_path: Path) -> None:
    experiment = prepare(resolve_config("demo", data=None, method=None, settings=SETTINGS, seed=3, device="cpu"))
    result = experiment.run(out=tmp_path / "run", resume=False, progress=SilentProgress())
    experiment.config.write(tmp_path / "run" / "config.yaml")
    left = result.history[-1]["widths"]
    assert any(width % 4 for width in left.values())
    found = rounded(tmp_path / "run", 4, tmp_path / "four")
    assert found == {name: max(4, round(width / 4) * 4) for name, width in left.items()}
    _, net = networks(tmp_path / "four")
    assert {name: net.get_submodule(name).weight.shape[0] for name in found} == found
