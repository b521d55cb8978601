"""What the flatness penalty sees, does and costs: eigenpairs in both modes, steps on q alone, K-FAC's v against the network's.

    python benchmarks/flatness_penalty.py --seeds 8                         handwritten digits on a CPU, 20 minutes
    python benchmarks/flatness_penalty.py --preset vgg16-cifar10-best --data DIR --device cuda --jobs 4 --out OUT.md
                                          [--seeds 3] [--variants mu=0,sam,network-0.03-every-4] [--parts cd]

a  from one dense checkpoint: the top eigenpair of the Hessian and of Gauss–Newton, in training and in evaluation mode, on
   training samples without augmentation, and the quotient of each eigenvector, and of K-FAC's v, in all four
b  from that checkpoint, 50 small steps on q alone: q, both sharpnesses, λ of every block
c  dense training from scratch with K-FAC's v and with the network's, B = 0, in every step or in one of four with four times
   the weight (`penalty_every`), at once or with μ rising from 0 over the first third of the epochs (`-warmup`), beside μ = 0
   and SAM: accuracy and both sharpnesses, paired by seed, ‖μ∇q‖/‖∇C‖
d  time of a training step of each of c, measured alternately in one process; on a CPU the process's own CPU time

In training mode the loss is the mean over batches of the training size, each with its own statistics. Every number is kept in
WORK/records.jsonl as soon as it is known: the same command continues after an interruption, and writes the report anew. A
training whose numbers are there is not repeated, though its weights be gone.
"""

import argparse
import contextlib
import datetime
import json
import math
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from epoch import steps
from hgnp.curvature.autodiff.passes import Passes
from hgnp.curvature.factors import WholeNetwork, find_blocks
from hgnp.curvature.network_direction import gauss_newton_product
from hgnp.curvature.step import Plan, State, Step, make_step
from hgnp.experiments import presets, reload
from hgnp.experiments.build import Experiment, prepare
from hgnp.experiments.config import Config
from hgnp.io import runs
from hgnp.io.atomic import write
from hgnp.progress import SilentProgress
from hgnp.reducer import LOCAL
from hgnp.timing import time_interleaved
from hgnp.training.optimizers import make_optimizer
from hgnp.training.task import Task
from hgnp.training.trainer import Trainer, make_steps
from results import log_interval, t_interval

Batches = list[tuple[Tensor, Tensor]]
CYCLE = 8
"""Steps that are timed together: a multiple of every `penalty_every` and `refresh_every`."""
STEPS = 50
LENGTH = 1e-3
"""Of a step on q alone, relative to the norm of all weights."""
NETWORK = {"recipe.flatness": {"direction_over": "network"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "mu=0": {"recipe.method": "taylor"},
    "sam": {"recipe.method": "sam", "recipe.rho": 0.05},
    "block-0.1": {"recipe.mu": 0.1},
    "network-0.03": {"recipe.mu": 0.03, **NETWORK},
    **{f"network-{mu:g}-every-4": {"recipe.mu": mu, "recipe.penalty_every": 4, **NETWORK} for mu in (0.01, 0.03, 0.1)},
    **{f"block-{mu:g}-every-4-warmup": {"recipe.mu": mu, "recipe.penalty_every": 4} for mu in (0.001, 0.01, 0.1)},
    **{
        f"network-{mu:g}-every-4-warmup": {"recipe.mu": mu, "recipe.penalty_every": 4, **NETWORK}
        for mu in (0.001, 0.01, 0.03, 0.1)
    },
}


# Matrices of the loss over a few thousand training samples, as products


@contextlib.contextmanager
def mode(net: nn.Module, training: bool) -> Iterator[None]:
    """Within, the network is in this mode; mode and buffers are restored."""
    before, buffers = net.training, [(buffer, buffer.clone()) for buffer in net.buffers()]
    net.train(training)
    try:
        yield
    finally:
        net.train(before)
        for buffer, value in buffers:
            buffer.copy_(value)


def parts_of(v: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    return [x.view(p.shape) for x, p in zip(v.split([p.numel() for p in parameters]), parameters, strict=True)]


def hessian_product(net: nn.Module, batches: Batches, training: bool, v: Tensor) -> Tensor:
    parameters = list(WholeNetwork(net).parameters.values())
    total = torch.zeros_like(v)
    with mode(net, training):
        for x, y in batches:
            gradient = torch.autograd.grad(F.cross_entropy(net(x), y), parameters, create_graph=True)
            found = torch.autograd.grad(gradient, parameters, parts_of(v, parameters), materialize_grads=True)
            total += len(y) * torch.cat([part.flatten() for part in found])
    return total / sum(len(y) for _, y in batches)


def ggn_product(net: nn.Module, batches: Batches, training: bool, v: Tensor) -> Tensor:
    network = WholeNetwork(net)
    parameters = list(network.parameters.values())
    tangents, total = list(zip(parameters, parts_of(v, parameters), strict=True)), torch.zeros_like(v)
    passes = Passes(net, F.cross_entropy, None, gauss_newton=True, over_network=True, reducer=LOCAL)
    with mode(net, training):
        for x, y in batches:
            found = passes.with_curvature(network, tangents, x, y, None, side_effect_free=True)
            total += len(y) * gauss_newton_product(found, network)
    return total / sum(len(y) for _, y in batches)


MATRICES: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "Hessian, training": (hessian_product, True),
    "Gauss–Newton, training": (ggn_product, True),
    "Hessian, evaluation": (hessian_product, False),
    "Gauss–Newton, evaluation": (ggn_product, False),
}


def top(
    product: Callable[[Tensor], Tensor], start: Tensor, steps: int, tolerance: float
) -> tuple[float, Tensor, float]:
    """The largest eigenvalue, its eigenvector and the relative residual, by Lanczos with full reorthogonalisation."""
    basis, alphas, betas = [start / start.norm()], [], []
    while True:
        w = product(basis[-1])
        alphas.append(float(w @ basis[-1]))
        for _ in range(2):
            for v in basis:
                w = w - v * (v @ w)
        T = torch.diag(torch.tensor(alphas, dtype=torch.double))
        off = torch.tensor(betas, dtype=torch.double)
        values, vectors = torch.linalg.eigh(T + torch.diag(off, 1) + torch.diag(off, -1))
        beta = float(w.norm())
        residual = beta * abs(float(vectors[-1, -1])) / max(abs(float(values[-1])), 1e-30)
        if residual < tolerance or len(basis) == steps or beta == 0:
            vector = sum(c * v for c, v in zip(vectors[:, -1].tolist(), basis, strict=True))
            assert isinstance(vector, Tensor)
            return float(values[-1]), vector / vector.norm(), residual
        betas.append(beta)
        basis.append(w / beta)


def sharpness(net: nn.Module, batches: Batches, training: bool, steps: int = 25, tolerance: float = 1e-2) -> float:
    size = sum(p.numel() for p in WholeNetwork(net).parameters.values())
    start = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(batches[0][0])
    return top(lambda v: hessian_product(net, batches, training, v), start, steps, tolerance)[0]


# The parts


class Records:
    """Facts by name, one JSON line each, kept as soon as they are known."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.facts: dict[str, Any] = {}
        if file.is_file():
            for line in file.read_text().splitlines():
                self.facts |= json.loads(line)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self.facts:
            start = time.perf_counter()
            self.facts[name] = make()
            with self.file.open("a") as file:
                file.write(json.dumps({name: self.facts[name]}) + "\n")
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        return self.facts[name]


def training_samples(made: Experiment, samples: int) -> Batches:
    """The first training images, without augmentation, in batches of the training size."""
    loader: Any = made.train
    loader.shuffle, loader.flip, loader.crop, loader.cutout = False, False, 0, 0
    batches, seen = [], 0
    for x, y in loader:
        if seen + len(y) > samples or (batches and len(y) < len(batches[0][1])):
            break
        batches.append((x, y))
        seen += len(y)
    return batches


def flat(direction: dict[str, Tensor], net: nn.Module) -> Tensor:
    parameters = WholeNetwork(net).parameters
    return torch.cat([direction.get(name, torch.zeros_like(p)).flatten() for name, p in parameters.items()])


def step_over(net: nn.Module, over: str) -> tuple[Step, State]:
    return make_step(net, mu=1.0, bound=-1e9, direction_over=over)


def q_gradient(
    step: Step, state: State, x: Tensor, y: Tensor
) -> tuple[float, list[Tensor], list[Tensor], dict[str, Tensor]]:
    """q, ∇q and ∇C of a batch along the lagged v, and that v; then v is refreshed."""
    parameters = list(WholeNetwork(step.net).parameters.values())
    state.plan = Plan(penalty=True, refresh=True)
    step.share(state, x, y)
    step.prepare(state, x, y)
    step.forward(state, x, y)
    step.decide(state)
    assert state.current is not None
    assert state.penalized is not None
    assert state.current.q is not None
    v = dict(zip(state.penalized.block.parameters, state.penalized.vectors, strict=True))
    q = torch.autograd.grad(state.current.q, parameters, retain_graph=True, materialize_grads=True)
    c = torch.autograd.grad(state.current.loss, parameters, retain_graph=True, materialize_grads=True)
    value = float(state.current.q.detach())
    step.refresh(state, y)
    state.release()
    return value, list(q), list(c), v


def norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(x.square().sum()) for x in tensors))


def eigenpairs(net: nn.Module, batches: Batches) -> dict[str, Any]:
    """Part a."""
    size = sum(p.numel() for p in WholeNetwork(net).parameters.values())
    start = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(batches[0][0])
    vectors, found = {}, {}
    for name, (product, training) in MATRICES.items():
        value, vector, residual = top(lambda v, p=product, t=training: p(net, batches, t, v), start, 60, 1e-3)
        vectors[name], found[name] = vector, {"value": value, "residual": residual, "blocks": shares(net, vector)}
    for over in ("block", "network"):
        step, state = step_over(net, over)
        with mode(net, True):
            for x, y in batches[:8]:
                *_, v = q_gradient(step, state, x, y)
        vectors[f"v, {over}"] = flat(v, net)
        found[f"v, {over}"] = {"blocks": shares(net, vectors[f"v, {over}"])}
    for name, vector in vectors.items():
        quotients = {
            other: float(vector @ product(net, batches, training, vector))
            for other, (product, training) in MATRICES.items()
        }
        found[name]["quotients"] = quotients
        found[name]["cosines"] = {other: abs(float(vector @ each)) for other, each in vectors.items() if other != name}
    return found


def shares(net: nn.Module, vector: Tensor) -> dict[str, float]:
    """A vector's squared length by layer, the three largest."""
    parameters = WholeNetwork(net).parameters
    by_layer: dict[str, float] = {}
    for name, part in zip(parameters, parts_of(vector, list(parameters.values())), strict=True):
        layer = name.rpartition(".")[0]
        by_layer[layer] = by_layer.get(layer, 0.0) + float(part.square().sum())
    return dict(sorted(by_layer.items(), key=lambda each: -each[1])[:3])


def steps_on_q(net: nn.Module, batches: Batches, over: str) -> list[dict[str, Any]]:
    """Part b: the facts after every tenth step."""
    found: list[dict[str, Any]] = []
    step, state = step_over(net, over)
    probe, watched = step_over(net, "block")
    parameters = list(WholeNetwork(net).parameters.values())
    weights = norm([p.detach() for p in parameters])
    qs: list[float] = []
    for number in range(STEPS + 1):
        x, y = batches[number % len(batches)]
        if number % 10 == 0:
            q_gradient(probe, watched, x, y)
            with torch.no_grad(), mode(net, True):
                loss = sum(float(F.cross_entropy(net(a), b)) for a, b in batches) / len(batches)
            found.append(
                {
                    "step": number,
                    "q": sum(qs[-5:]) / len(qs[-5:]) if qs else q_gradient(step, state, x, y)[0],
                    "loss": loss,
                    "training": sharpness(net, batches, True),
                    "evaluation": sharpness(net, batches, False),
                    "blocks": {
                        block.name: float(watched.direction.pairs[block.name].value) for block in find_blocks(net)
                    },
                }
            )
        q, gradient, _, _ = q_gradient(step, state, x, y)
        qs.append(q)
        length = norm(gradient)
        with torch.no_grad():
            for p, g in zip(parameters, gradient, strict=True):
                p.sub_(g, alpha=LENGTH * weights / max(length, 1e-30))
    return found


def trained_facts(folder: Path, batches: Batches, data: str | None, device: str) -> dict[str, Any]:
    """Part c: of a finished run."""
    made = reload.experiment(folder, data, device)
    net = made.net.to(device).train()
    run, result = runs.read(folder), json.loads((folder / "result.json").read_text())
    rows = [row for row in run.rows if row["epoch"] > 0] or list(run.rows)
    facts = {
        "metric": result["after"]["metric"],
        "training": sharpness(net, batches, True),
        "evaluation": sharpness(net, batches, False),
        "seconds": sum(row["seconds"] for row in rows) / len(rows),
    }
    for over in ("block", "network"):
        step, state = step_over(net, over)
        ratios, values = [], []
        for x, y in batches[:8]:
            q, dq, dc, _ = q_gradient(step, state, x, y)
            values.append(q)
            ratios.append(norm(dq) / max(norm(dc), 1e-30))
        facts |= {f"q {over}": sum(values) / len(values), f"ratio {over}": sum(ratios) / len(ratios)}
    return facts


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """Of every run of part c."""
    base = {
        "recipe.keep": 1.0, "recipe.warmup_epochs": 0, "recipe.finetune_epochs": given.epochs, "recipe.schedule": "cosine",
        "recipe.anneal": "run", "recipe.method": "hgnp", "recipe.flatness": "default", "recipe.bound": 0.0, "recipe.mu": 0.0,
        "recipe.refresh_every": None, "recipe.skip_inactive": False, "recipe.measure": "none", "recipe.round_to": 1,
        "recipe.checkpoint_every": 8,
    }  # fmt: skip
    if "label_smoothing" in presets.preset(given.preset).loss_args:
        base["loss_args.label_smoothing"] = 0.0  # curvature is measured of the plain loss
    return base | {path: yaml.safe_load(text) for path, _, text in (each.partition("=") for each in given.set)}


def changes_of(name: str, epochs: int) -> dict[str, Any]:
    """The settings of a variant: μ warms up over the first third of the epochs, if it does."""
    changes = VARIANTS[name]
    return changes | {"recipe.mu_warmup_epochs": max(1, epochs // 3)} if name.endswith("-warmup") else changes


def seeds_of(given: argparse.Namespace) -> range:
    return range(given.first_seed, given.first_seed + given.seeds)


def folder_of(given: argparse.Namespace, name: str, seed: int) -> Path:
    folder: Path = given.work / f"dense-{name.replace('=', '')}-{seed}"
    return folder


def train(given: argparse.Namespace, seed: int, names: list[str]) -> None:
    """Those of these trainings that are not finished, one after the other."""
    for name in names:
        folder = folder_of(given, name, seed)
        made = prepare(configuration(given, settings(given) | changes_of(name, given.epochs) | {"seed": seed}))
        folder.mkdir(parents=True, exist_ok=True)
        made.config.write(folder / "config.yaml")
        made.run(out=folder, resume=(folder / "run.json").is_file(), progress=SilentProgress())


def study(given: argparse.Namespace, seed: int, names: list[str]) -> None:
    """The same in processes of their own, several at once."""
    file = given.work / "study.yaml"
    plan = {
        "networks": [{"config": given.preset, "name": "dense", "set": settings(given)}],
        "methods": {name.replace("=", ""): {"set": changes_of(name, given.epochs)} for name in VARIANTS},
        "seeds": seed + 1,
    }
    write(file, yaml.safe_dump(plan, sort_keys=False))
    options = {
        "--out": given.work, "--jobs": given.jobs, "--device": given.device, "--data": given.data, "--seeds": seed,
        "--methods": ",".join(name.replace("=", "") for name in names),
    }  # fmt: skip
    command = [sys.executable, "-m", "hgnp", "study", str(file)]
    for option, value in options.items():
        command += [] if value is None else [option, str(value)]
    subprocess.run(command, check=False)


def step_times(given: argparse.Namespace, names: list[str], batches: Batches) -> dict[str, float]:
    """Part d: milliseconds per step."""
    device, cycle = torch.device(given.device), [batches[i % len(batches)] for i in range(CYCLE)]
    calls: list[Callable[[], Any]] = []
    for name in names:
        made = prepare(configuration(given, settings(given) | changes_of(name, given.epochs)))
        net = made.net.to(device)
        if device.type == "cuda":  # as a run chooses
            net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        loss = made.options.get("loss", F.cross_entropy)
        step, _, state = make_steps(net, Task(made.train, None, loss, None, None), made.recipe)
        trainer = Trainer(step, state, make_optimizer(net, made.recipe, None), made.recipe, device)
        calls.append(lambda trainer=trainer: timed(trainer, cycle))
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    found = time_interleaved(calls, device=device, repeats=given.repeats, warmup=4, clock=clock)
    return {name: each.median / CYCLE for name, each in zip(names, found, strict=True)}


def timed(trainer: Trainer, cycle: Batches) -> None:
    with trainer.running():
        steps(trainer, cycle, len(cycle))


def configuration(given: argparse.Namespace, changes: dict[str, Any]) -> Config:
    words = [f"{path}={json.dumps(value)}" for path, value in changes.items()]
    data = [f"data_args.folder={given.data}"] if given.data else []
    return presets.preset(given.preset).with_settings([f"device={given.device}", *given.set, *data, *words])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="demo")
    parser.add_argument("--data")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of hgnp run, for every run")
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--parts", default="abcd")
    parser.add_argument("--repeats", type=int, default=15, help="of part d")
    parser.add_argument(
        "--jobs", type=int, default=0, help="trainings at once; 0: one after the other, in this process"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/flatness_penalty"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    names = given.variants.split(",")
    if unknown := set(names) - set(VARIANTS):
        parser.error(f"--variants must be of {', '.join(VARIANTS)}, got {', '.join(sorted(unknown))}")
    given.work.mkdir(parents=True, exist_ok=True)
    records = Records(given.work / "records.jsonl")
    now = {"preset": given.preset, "set": given.set, "samples": given.samples, "epochs": given.epochs}
    if (before := records.once("settings", lambda: now)) != now:
        parser.error(f"--work must be a folder without records of other settings, got {given.work} with {before}")
    batches = training_samples(prepare(configuration(given, {})), given.samples)
    if "d" in given.parts:  # first, while nothing else runs
        records.once("d", lambda: step_times(given, list(VARIANTS), batches))
    for seed in seeds_of(given):
        missing = [name for name in names if f"c {name} {seed}" not in records.facts] if "c" in given.parts else []
        if seed == 0 and "mu=0" in set(names) - set(missing) and needs_checkpoint(given, records):
            missing.insert(0, "mu=0")
        if missing:
            (study if given.jobs else train)(given, seed, missing)
        for name in missing:
            folder = folder_of(given, name, seed)
            if (folder / "result.json").is_file() and (folder / "model.safetensors").is_file():
                records.once(f"c {name} {seed}", lambda f=folder: trained_facts(f, batches, given.data, given.device))
        if seed == 0 and (folder_of(given, "mu=0", 0) / "model.safetensors").is_file():
            diagnose(given, records, batches)
    text = report(records.facts, given, sum(len(y) for _, y in batches))
    print(text)
    if given.out is not None:
        write(given.out, text)


def needs_checkpoint(given: argparse.Namespace, records: Records) -> bool:
    """Whether numbers of parts a and b are missing, and so is the network that they are of."""
    wanted = {"a": ["a"], "b": ["b block", "b network"]}
    facts = [fact for part, its in wanted.items() if part in given.parts for fact in its]
    return (
        any(fact not in records.facts for fact in facts) and not (folder_of(given, "mu=0", 0) / "result.json").is_file()
    )


def diagnose(given: argparse.Namespace, records: Records, batches: Batches) -> None:
    """Parts a and b, from the network that was trained with μ = 0."""

    def checkpoint() -> nn.Module:
        net: nn.Module = reload.experiment(folder_of(given, "mu=0", 0), given.data, given.device).net
        return net.to(given.device).train()

    if "a" in given.parts:
        records.once("a", lambda: eigenpairs(checkpoint(), batches))
    for over in ("block", "network") if "b" in given.parts else ():
        records.once(f"b {over}", lambda over=over: steps_on_q(checkpoint(), batches, over))


# The report


def report(facts: dict[str, Any], given: argparse.Namespace, samples: int) -> str:
    where = torch.cuda.get_device_name() if given.device.startswith("cuda") else "CPU"
    command = shlex.join(["python", "benchmarks/flatness_penalty.py", *sys.argv[1:]])
    lines = [
        "# The flatness penalty, measured", "",
        f"`{command}`, {datetime.date.today()}, {where}, torch {torch.__version__}.", "",
        f"`{given.preset}`, dense, {given.epochs} epochs, {samples:,} training samples, not augmented. In training mode,",
        "means over batches of the training size, each with its own statistics. Sharpness: the Hessian's top eigenvalue.", "",
    ]  # fmt: skip
    for section in (_eigenpairs, _steps, _trained):
        lines += section(facts, given)
    return "\n".join(lines) + "\n"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        "|---" + "|--:" * (len(head) - 1) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


def _eigenpairs(facts: dict[str, Any], given: argparse.Namespace) -> list[str]:
    if "a" not in facts:
        return []
    found, names = facts["a"], list(MATRICES)
    rows = [
        [
            name,
            *(f"{each['quotients'][other]:.3g}" for other in names),
            f"{each['cosines'].get('Hessian, evaluation', 1):.2f}",
            ", ".join(f"{layer} {share:.0%}" for layer, share in each["blocks"].items()),
        ]
        for name, each in found.items()
    ]
    head = ["vector", *(f"in {name}" for name in names), "cosine to the Hessian's in evaluation", "layers"]
    return ["## a. Eigenvectors and their quotients in each matrix", "", *_table(head, rows)]


def _steps(facts: dict[str, Any], given: argparse.Namespace) -> list[str]:
    lines = []
    for over in ("block", "network"):
        if (rows := facts.get(f"b {over}")) is None:
            continue
        shown = [
            [str(row["step"]), f"{row['q']:.3g}", f"{row['loss']:.3g}", f"{row['training']:.3g}", f"{row['evaluation']:.3g}",
             ", ".join(f"{value:.2g}" for value in row["blocks"].values())]
            for row in rows
        ]  # fmt: skip
        head = ["step", "q (mean of 5)", "C", "sharpness, training", "sharpness, evaluation", "K-FAC's λ by block"]
        title = f"## b. Steps on q alone, v over the {over}"
        about = f"Steps along −∇q of length {LENGTH:g}·‖w‖, v refreshed in every step."
        lines += [title, "", about, "", *_table(head, shown)]
    return lines


def _trained(facts: dict[str, Any], given: argparse.Namespace) -> list[str]:
    made: dict[str, dict[int, dict[str, float]]] = {}
    for name in VARIANTS:
        seeds = {seed: facts[f"c {name} {seed}"] for seed in seeds_of(given) if f"c {name} {seed}" in facts}
        if seeds:
            made[name] = seeds
    plain, times, rows, each_seed = made.get("mu=0", {}), facts.get("d", {}), [], []
    for name, runs_of in made.items():
        seeds = sorted(runs_of.keys() & plain.keys())
        mu, over = VARIANTS[name].get("recipe.mu", 0.0), "network" if name.startswith("network") else "block"
        ratios = {
            mode: [runs_of[seed][mode] / plain[seed][mode] for seed in seeds] for mode in ("training", "evaluation")
        }
        points = [100 * (runs_of[seed]["metric"] - plain[seed]["metric"]) for seed in seeds]
        strength = statistics.mean(run["ratio " + over] for run in runs_of.values())
        rows.append(
            [name, str(len(runs_of)), f"{100 * statistics.mean(run['metric'] for run in runs_of.values()):.2f}",
             "–" if name == "mu=0" else interval(points, "+.2f"),
             *("–" if name == "mu=0" else log_interval(ratios[mode]) for mode in ratios), f"{mu * strength:.2g}" if mu else "–",
             *(f"{times[name] / times[base]:.2f}" if name in times and base in times else "–" for base in ("mu=0", "sam"))]
        )  # fmt: skip
        each_seed.append(
            [name, *(", ".join(f"{scale * runs_of[seed][key]:.3g}" for seed in sorted(runs_of))
                     for key, scale in (("metric", 100), ("training", 1), ("evaluation", 1)))]
        )  # fmt: skip
    if not rows:
        return []
    head = [
        "training", "seeds", "accuracy, %", "minus μ = 0, points", "sharpness over μ = 0, training mode", "evaluation mode",
        "‖μ∇q‖/‖∇C‖", "step over μ = 0", "step over SAM",
    ]  # fmt: skip
    about = (
        "B = 0. Differences and ratios (geometric means) are paired by seed, with 95 % t intervals in brackets. ‖μ∇q‖/‖∇C‖: at "
        "the end of training, over 8 batches. Time of a step: medians, measured alternately in one process."
    )
    title = "## c and d. Training with K-FAC's v and with the network's; what it costs"
    return [title, "", about, "", *_table(head, rows), "Of each seed:", "",
            *_table(["training", "accuracy, %", "sharpness, training", "sharpness, evaluation"], each_seed)]  # fmt: skip


def interval(values: list[float], form: str) -> str:
    found = t_interval(values)
    if found is None:
        return format(values[0], form) if values else "–"
    return f"{found.mean:{form}} ({found.low:{form}} to {found.high:{form}})"


if __name__ == "__main__":
    main()
