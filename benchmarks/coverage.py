"""How much of a network can be pruned, and whether what comes out is right: hgnp and Torch-Pruning on the same checks.

    python benchmarks/coverage.py [names…] [--out benchmarks/coverage.md]

Each network is measured with each tool in a process of its own, so that a crash is a row and not an end. Rows are appended to
runs/coverage.jsonl with the commit of `src`; what is there for the present one is not measured again, so a run can be
interrupted, continued and divided by names (`detect/ segment/`). With `--older`, rows of other commits count too.
`coverage_report.py` turns them into the report.
"""

import argparse
import copy
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils._pytree import tree_map
from transformers.pytorch_utils import Conv1D

import hgnp
from coverage_report import render
from hgnp.pruning.summary import Frozen
from models import HIDDEN, Case, Inputs, cases

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from oracles import flat, masked, run, worst_error

OUTPUT = "it is the network's output"
LIMIT_S = {"hgnp": 1800, "torch-pruning": 300}
Row = dict[str, Any]


# What is measured on


def rows_of(net: nn.Module) -> dict[str, int]:
    """Layer → its neurons: output rows of linear layers and convolutions, Hugging Face's Conv1D among them."""
    found = {}
    for name, module in net.named_modules():
        if isinstance(module, Conv1D):
            found[name] = module.weight.shape[1]
        elif isinstance(module, nn.Linear):
            found[name] = module.weight.shape[0]
        elif isinstance(module, _ConvNd):
            found[name] = module.out_channels
    return found


def prepare(case: Case) -> tuple[nn.Module, Inputs]:
    """The network and its input in float64, with nothing left at a neutral value: norms, biases, layer scales. Norms have
    statistics near those of the input: otherwise the signal of a deep network vanishes, and a detector's scores are equal."""
    torch.manual_seed(0)
    net = case.make().double()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() <= 1 or bool((parameter == parameter.reshape(-1)[0]).all()):
                around = 0.0 if bool((parameter == 0).all()) else 1.0
                parameter.copy_(around + 0.2 * torch.randn_like(parameter))
        inputs = tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, case.inputs())
        norms = [module for module in net.modules() if isinstance(module, _NormBase) and module.running_var is not None]
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = None
        run(net.train(), inputs)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            norm.running_mean.add_(0.1 * norm.running_var.sqrt() * torch.randn_like(norm.running_mean))
            norm.running_var.mul_(torch.rand_like(norm.running_var) * 1.5 + 0.5)
    return net, inputs


def train_step(net: nn.Module, inputs: Inputs, optimizer: torch.optim.Optimizer) -> None:
    net.train()
    optimizer.zero_grad()
    flat(run(net, inputs)).square().mean().backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # random weights without norms can give enormous outputs
    optimizer.step()
    optimizer.zero_grad()
    net.eval()


def output_of(net: nn.Module, inputs: Inputs, watched: tuple[str, ...] = ()) -> Tensor:
    """All that the network and the watched modules return in evaluation mode."""
    found: list[Any] = []
    handles = [
        net.get_submodule(name).register_forward_hook(lambda module, args, output: found.append(output))
        for name in watched
    ]
    try:
        with torch.no_grad():
            found.append(run(net.eval(), inputs))
    finally:
        for handle in handles:
            handle.remove()
    return flat(found)


class Removed:
    """Original positions of everything removed so far, over several removals: rows of layers; and of heads, whose rows are not
    neurons, the columns of the layer that reads them."""

    def __init__(self, net: nn.Module, rows: Mapping[str, int]) -> None:
        self._left = {name: torch.arange(count) for name, count in rows.items()}
        self._rows, self._modules = rows, dict(net.named_modules())
        self._counts = {name: self._modules[name].weight.shape[self._columns_dim(name)] for name in rows}
        self._columns = {name: torch.arange(count) for name, count in self._counts.items()}
        self._readers: set[str] = set()

    def _columns_dim(self, name: str) -> int:
        return 0 if isinstance(self._modules[name], Conv1D | _ConvTransposeNd) else 1

    def note(self, selection: Mapping[str, Any], removal: hgnp.Removal | None = None) -> None:
        """Take note of positions that were right just before this removal."""
        for name, positions in selection.items():
            if name in self._rows:
                stay = torch.ones(len(self._left[name]), dtype=torch.bool)
                stay[list(positions)] = False
                self._left[name] = self._left[name][stay]
        if removal is None:
            return
        cut = {name: removal.slices.get(f"{name}.weight", {}).get(self._columns_dim(name)) for name in self._rows}
        for name, kept in cut.items():
            if getattr(self._modules[name], "groups", 1) > 1:  # its columns are those of each group
                cut[name] = None
            elif kept is not None:
                self._columns[name] = self._columns[name][kept]
        for attention in selection.keys() - self._rows.keys():  # its heads are read in the module, or beside it
            scope = f"{attention.rpartition('.')[0]}.".removeprefix(".")
            self._readers |= {name for name, kept in cut.items() if name.startswith(scope) and kept is not None}

    @contextmanager
    def masked(self, net: nn.Module, inputs: Inputs) -> Iterator[None]:
        """Inside the block, `net` has the removed rows masked, and heads where they are read."""
        handles = []
        for name in self._readers:
            layer = net.get_submodule(name)
            mask = torch.zeros(self._counts[name], dtype=torch.double)
            mask[self._columns[name]] = 1
            mask = mask.view(-1, *(1,) * (layer.weight.dim() - 2)) if isinstance(layer, _ConvNd) else mask
            handles.append(layer.register_forward_pre_hook(partial(_mask_input, mask)))
        try:
            with masked(net, self.positions(), inputs):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def positions(self) -> dict[str, list[int]]:
        gone = {name: sorted(set(range(count)) - set(self._left[name].tolist())) for name, count in self._rows.items()}
        return {name: positions for name, positions in gone.items() if positions}


def _mask_input(mask: Tensor, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args[0] * mask, *args[1:]


def error_against_mask(
    small: nn.Module, net: nn.Module, removed: Removed, inputs: Inputs, watched: tuple[str, ...]
) -> tuple[float, float]:
    """How far the pruned network is from the masked one, and the masked one from the whole one."""
    with torch.no_grad(), removed.masked(net, inputs):
        want = output_of(net, inputs, watched)
    return tuple(worst_error(output_of(each, inputs, watched), want) for each in (small, net))


def check(row: Row, name: str, test: Callable[[], bool]) -> None:
    """Whether a test passes; what it raised is kept."""
    try:
        row[name] = bool(test())
    except Exception as error:
        row[name] = False
        row[f"{name}_error"] = f"{type(error).__name__}: {(str(error) or '?').splitlines()[0][:200]}"


def trains(net: nn.Module, inputs: Inputs, optimizer: torch.optim.Optimizer) -> bool:
    """The optimizer made before the removal holds every parameter and moves them."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    before = [parameter.detach().clone() for parameter in net.parameters()]
    train_step(net, inputs, optimizer)
    moved = [not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)]
    return all(id(parameter) in held for parameter in net.parameters()) and any(moved)


def exports(net: nn.Module, inputs: Inputs, name: str = "") -> bool:
    """Whether the network, or the module of this name, can be exported, with the same outputs."""
    given: list[Inputs] = []
    part = net.get_submodule(name)
    handle = part.register_forward_pre_hook(lambda module, args, kwargs: given.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        run(net.eval(), inputs)
    handle.remove()
    net, inputs = part, given[0]
    with torch.no_grad():
        program = torch.export.export(net.eval(), *inputs, strict=False)
        return worst_error(program.module()(*inputs[0], **inputs[1]), run(net, inputs)) < 1e-10


# The two tools


def measure_hgnp(case: Case) -> Row:
    small, inputs = prepare(case)
    rows = rows_of(small)
    optimizer = torch.optim.SGD(small.parameters(), lr=1e-3, momentum=0.9)
    train_step(small, inputs, optimizer)
    net = copy.deepcopy(small).eval()
    start = time.perf_counter()
    neurons = hgnp.Neurons(small.eval(), inputs[0] or inputs[1])
    row: Row = {"build_s": time.perf_counter() - start, **_shares(neurons, rows)}
    if not neurons.count:
        return row
    removed, errors, changed = Removed(small, rows), [], []
    removals: list[hgnp.Removal] = []
    neurons.listeners.append(lambda removal: removals.append(removal) or (lambda: None))  # type: ignore[func-returns-value]
    count = neurons.count
    singles = [partial(_one_layer, seed=seed) for seed in range(1 if count > 20_000 else 3)]
    for draw in (*singles, partial(_half, start=count)):
        selection = draw(neurons)
        start = time.perf_counter()
        gone = neurons.remove(selection, optimizer)
        row["remove_s"] = time.perf_counter() - start
        removed.note(gone, removals[-1] if gone else None)
        error, change = error_against_mask(small, net, removed, inputs, case.watched)
        errors.append(error)
        changed.append(change)
    row |= {"error": max(errors, key=lambda e: math.inf if math.isnan(e) else e), "changed": min(changed), "runs": True}
    row["removed"] = sum(map(len, removed.positions().values())) / row["total"]
    del net
    check(row, "trains", lambda: trains(small, inputs, optimizer))
    check(row, "loads", lambda: _reloads(small, case, inputs))
    check(row, "exports", lambda: all(exports(small, inputs, part) for part in case.exported))
    return row


def _shares(neurons: hgnp.Neurons, rows: Mapping[str, int]) -> Row:
    reasons: Counter[str] = Counter()
    stuck: Counter[str] = Counter()
    for entry in neurons.frozen:
        if entry.name in rows:
            reasons[entry.reason] += entry.count
            stuck[entry.name] += entry.count
    heads = {layer.name: layer.alive for layer in neurons.layers if layer.name not in rows}
    frozen = {entry.name: entry for entry in neurons.frozen if entry.name not in rows}
    for name in rows.keys() - {layer.name for layer in neurons.layers} - stuck.keys():  # rows of heads
        owner = max((each for each in {*heads, *frozen} if name.startswith(f"{each}.")), key=len, default=None)
        if owner in frozen or owner is None:
            reasons["no reason given" if owner is None else frozen[owner].reason] += rows[name]
            stuck[name] += rows[name]
    outputs = reasons.pop(OUTPUT, 0)
    total = sum(rows.values()) - outputs
    hidden = [name for name in rows if HIDDEN.search(name)]
    return {
        "total": total,
        "prunable": total - sum(reasons.values()),
        "reasons": dict(reasons),
        "heads": [sum(heads.values()), sum(heads.values()) + sum(entry.count for entry in frozen.values())],
        "heads_stuck": _stuck_heads(neurons, list(frozen.values())),
        "hidden": len(hidden),
        "hidden_stuck": [name for name in hidden if stuck[name]],
    }


def _stuck_heads(neurons: hgnp.Neurons, frozen: list[Frozen]) -> dict[str, Row]:
    """Class of attention module → how many of its heads stay, a module and its reason; without a number where the same position
    of every head is removed instead."""
    modules, found = dict(neurons.net.named_modules()), dict[str, Row]()
    inside = [(name, "", 0) for name in sorted(neurons._structure.without_heads)]
    for name, reason, count in [*((entry.name, entry.reason, entry.count) for entry in frozen), *inside]:
        kind = f"{type(modules[name]).__module__}.{type(modules[name]).__qualname__}"
        found.setdefault(kind, {"count": 0, "module": name, "reason": reason})["count"] += count
    return found


def _one_layer(neurons: hgnp.Neurons, seed: int) -> hgnp.Selection:
    """About a third of one layer, with what hangs on it."""
    draw = torch.Generator().manual_seed(seed)
    layer = neurons.layers[int(torch.randint(len(neurons.layers), (1,), generator=draw))]
    scores = {other.name: torch.rand(other.alive, generator=draw) + 10 for other in neurons.layers}
    scores[layer.name] -= 10 * len(scores)  # units with a part in this layer come first
    count = max(1, layer.alive // 3)
    while not (selection := neurons.least(scores, count)) and count < neurons.count:
        count *= 2
    return selection


def _half(neurons: hgnp.Neurons, start: int) -> hgnp.Selection:
    """At random, until half of the `start` neurons are gone."""
    draw = torch.Generator().manual_seed(start)
    scores = {layer.name: torch.rand(layer.alive, generator=draw) for layer in neurons.layers}
    return neurons.least(scores, max(0, neurons.count - start // 2))


def _reloads(small: nn.Module, case: Case, inputs: Inputs) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        hgnp.save(small, folder)
        again = hgnp.load(folder, case.make().double().eval())
    return torch.equal(*(output_of(each, inputs, case.watched) for each in (again, small)))


def measure_torch_pruning(case: Case) -> Row:
    """Half of every layer with Torch-Pruning's usual pruner, the layers that make the outputs left alone."""
    import torch_pruning as tp

    small, inputs = prepare(case)
    rows = rows_of(small)
    optimizer = torch.optim.SGD(small.parameters(), lr=1e-3, momentum=0.9)
    train_step(small, inputs, optimizer)
    net = copy.deepcopy(small).eval()
    modules = dict(small.named_modules())
    outputs = [entry.name for entry in hgnp.Neurons(small, inputs[0] or inputs[1]).frozen if entry.reason == OUTPUT]
    names = {module: name for name, module in modules.items()}
    example = inputs[0][0] if inputs[0] else inputs[1]
    start = time.perf_counter()
    pruner = tp.pruner.BasePruner(
        small, example, importance=tp.importance.GroupMagnitudeImportance(p=2), pruning_ratio=0.5,
        ignored_layers=[modules[name] for name in outputs],
    )  # fmt: skip
    row: Row = {"build_s": time.perf_counter() - start}
    total = sum(count for name, count in rows.items() if name not in outputs)
    removed = Removed(small, rows)
    for group in pruner.step(interactive=True):
        selection: dict[str, set[int]] = {}
        for dependency, places in group:
            name = names.get(dependency.target.module)
            if name in rows and pruner.DG.is_out_channel_pruning_fn(dependency.handler):
                selection.setdefault(name, set()).update(places)
        group.prune()
        removed.note(selection)
    left = rows_of(small)
    row["removed"] = sum(count - left[name] for name, count in rows.items() if name not in outputs) / total
    check(row, "runs", lambda: output_of(small, inputs, case.watched) is not None)
    if row["runs"]:
        try:
            row["error"], row["changed"] = error_against_mask(small, net, removed, inputs, case.watched)
        except Exception as error:
            row["mask_error"] = f"{type(error).__name__}: {error}"
    del net
    check(row, "trains", lambda: trains(small, inputs, optimizer))
    check(row, "loads", lambda: not case.make().double().load_state_dict(small.state_dict()).missing_keys)
    check(row, "exports", lambda: all(exports(small, inputs, part) for part in case.exported))
    return row


MEASURES = {"hgnp": measure_hgnp, "torch-pruning": measure_torch_pruning}


# Running


def _child(name: str, tool: str, path: Path) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    row: Row = {"model": name, "tool": tool, "kind": cases()[name].kind, "commit": commit()}
    try:
        row |= MEASURES[tool](cases()[name])
    except Exception as error:
        row["crash"] = f"{type(error).__name__}: {(str(error) or '?').splitlines()[0][:300]}"
    append(path, row)


def append(path: Path, row: Row) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


@cache
def commit() -> str:
    """The last one that changed the library."""
    command = ["git", "log", "-1", "--format=%h", "--first-parent", "--", "src"]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent
    ).stdout.strip()


def read(path: Path, *, older: bool = False) -> dict[tuple[str, str], Row]:
    rows = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return {(row["model"], row["tool"]): row for row in rows if older or row.get("commit") == commit()}


def measure(name: str, tool: str, path: Path) -> None:
    """One row, made in a process of its own; what killed it, if it leaves none."""
    start = time.perf_counter()
    process = multiprocessing.get_context("fork").Process(target=_child, args=(name, tool, path))
    process.start()
    process.join(LIMIT_S[tool])
    if process.is_alive():
        process.kill()
        process.join()
    if (name, tool) not in read(path):
        ended = time.perf_counter() - start > LIMIT_S[tool]
        why = f"not done after {LIMIT_S[tool]} s" if ended else f"killed (exit code {process.exitcode})"
        append(path, {"model": name, "tool": tool, "kind": cases()[name].kind, "commit": commit(), "crash": why})
    row = read(path)[name, tool]
    shown = {
        key: row[key]
        for key in ("crash", "prunable", "total", "removed", "error", "trains", "loads", "exports", "build_s")
        if key in row
    }
    print(f"{name:28} {tool:14} {time.perf_counter() - start:6.1f} s  {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="networks, or the beginnings of their names; all by default")
    parser.add_argument("--out", type=Path, help="write the report here")
    parser.add_argument("--rows", type=Path, default=Path("runs/coverage.jsonl"), help="where measurements are kept")
    parser.add_argument("--tool", choices=MEASURES, action="append", help="only this tool")
    parser.add_argument("--older", action="store_true", help="count rows of other commits of the library too")
    arguments = parser.parse_args()
    arguments.rows.parent.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in cases() if not arguments.names or name.startswith(tuple(arguments.names))]
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # torchvision compiles RoI align where its own operators are missing
    commit()  # before any fork: the library may change meanwhile
    exports(nn.Linear(1, 1).double(), ((torch.zeros(1, 1).double(),), {}))  # loads the exporter once, before any fork
    for tool in arguments.tool or MEASURES:
        for name in wanted:
            if (name, tool) not in read(arguments.rows, older=arguments.older):
                measure(name, tool, arguments.rows)
    if arguments.out:
        found = read(arguments.rows, older=arguments.older)
        arguments.out.write_text(
            render([row for name in cases() for tool in MEASURES if (row := found.get((name, tool)))], cases())
        )


if __name__ == "__main__":
    main()
