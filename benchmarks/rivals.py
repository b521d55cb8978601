"""Torch-Pruning's group pruner driven by hgnp's training, beside `hgnp study cifar10-rivals`.

    python benchmarks/rivals.py --data DIR --device cuda --out results/cifar10-rivals [--seeds 0,1,2] [--keep 0.1,0.05]

The same network, data, loss, optimizer and schedule as the study: warm-up, then a round and an epoch at the peak learning rate
until at most `keep` of the parameters is left, then the fine-tuning with its cosine. A round is a step of `GroupNormPruner`:
group L2 norms over the whole network, widths in multiples of 8; the last one removes as few channels as the target needs. Its
sparsity regularisation is not used, as the other methods have none. Torch-Pruning leaves the optimizer with dead parameters: it
starts without momentum after every round, as its own examples do. Epochs run on hgnp's executor, so that times can be compared.

OUT/vgg16-cifar10-torch-pruning-KEEP-SEED is the run folder of the fine-tuning, with rival.json beside it. The state before the
fine-tuning is kept there too: the same command continues after an interruption.
"""

import argparse
import copy
import dataclasses
import importlib.util
import json
from pathlib import Path

import torch
from torch import nn

import hgnp
from hgnp.experiments import studies
from hgnp.experiments.build import Experiment, network, prepare
from hgnp.experiments.config import Config
from hgnp.io.atomic import write
from hgnp.progress import LineProgress, SilentProgress
from hgnp.train import prune_and_report

METHOD = "torch-pruning"


def configuration(seed: int, data: str | None, device: str, settings: list[str]) -> Config:
    """That of the study's Taylor run with this seed."""
    runs = studies.study("cifar10-rivals").runs(data=data, device=device, seeds=[seed], settings=settings)
    return next(run.config for run in runs if run.method == "taylor")


def sizes(net: nn.Module, example: torch.Tensor) -> tuple[int, int]:
    """Parameters, and MACs of convolutions and linear layers for one image."""
    macs = []
    hooks = [
        layer.register_forward_hook(lambda layer, _, out: macs.append(layer.weight.numel() * out[0, 0].numel()))
        for layer in net.modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
    ]
    mode = net.training
    with torch.no_grad():
        net.eval()(example[:1])
    net.train(mode)
    for hook in hooks:
        hook.remove()
    return sum(p.numel() for p in net.parameters()), sum(macs)


def train(
    made: Experiment, recipe: hgnp.Recipe, epochs: int, out: Path | None = None, resume: bool = False
) -> hgnp.Result:
    """Trains the network, unpruned, for this many epochs: at the peak learning rate, or fine-tuned into a run folder."""
    recipe = dataclasses.replace(
        recipe, keep=1.0, warmup_epochs=0, finetune_epochs=epochs, snapshots=(), round_to=1, measure="none",
        schedule="constant" if out is None else recipe.schedule, seed=None if out is None else recipe.seed,
    )  # fmt: skip
    val, progress = (None, SilentProgress()) if out is None else (made.val, LineProgress())
    return prune_and_report(
        made.net, made.train, val, recipe=recipe, out=out, resume=resume, progress=progress,
        about=None if out is None else made.about, **made.options,
    )  # fmt: skip


def channels(net: nn.Module) -> int:
    return sum(layer.out_channels for layer in net.modules() if isinstance(layer, nn.Conv2d))


def remove(net: nn.Module, example: torch.Tensor, round_to: int, count: int) -> None:
    """Removes the `count` least important channels, and more where a layer's width would be no multiple of `round_to`."""
    import torch_pruning as tp  # benchmarks only

    last = [layer for layer in net.modules() if isinstance(layer, nn.Linear)][-1]
    tp.pruner.GroupNormPruner(
        net, example, importance=tp.importance.GroupMagnitudeImportance(p=2), global_pruning=True,
        pruning_ratio=count / channels(net), ignored_layers=[last], round_to=round_to,
    ).step()  # fmt: skip


def after_round(net: nn.Module, example: torch.Tensor, round_to: int, count: int, target: float) -> nn.Module:
    """A copy without `count` channels, or without as few as leave at most `target` parameters."""

    def cut(count: int) -> nn.Module:
        other = copy.deepcopy(net)
        remove(other, example, round_to, count)
        return other

    found = cut(count)
    low, high = 1, count if sizes(found, example)[0] < target else 1
    while low < high:
        middle = (low + high) // 2
        other = cut(middle)
        if sizes(other, example)[0] <= target:
            high, found = middle, other
        else:
            low = middle + 1
    return found


def run(keep: list[float], seed: int, given: argparse.Namespace) -> None:
    """All κ of one seed: the pruning goes through them, and at each a copy is fine-tuned by itself."""
    config = configuration(seed, given.data, given.device, given.set)
    places = {each: given.out / f"vgg16-cifar10-{METHOD}-{each:g}-{seed}" for each in keep}
    if all((place / "result.json").is_file() for place in places.values()):
        print(f"seed {seed}: known", flush=True)
        return
    made = prepare(config)
    recipe, example = made.recipe, next(iter(made.train))[0][:2].to(given.device)
    net = made.net.to(given.device)
    full = sizes(net, example)
    if not all((place / "pruned.safetensors").is_file() for place in places.values()):
        train(made, recipe, recipe.warmup_epochs)
        rounds, excess = 0, 0  # rounding to multiples removes more than was asked for; the next round removes fewer
        for each in sorted(keep, reverse=True):
            while (now := sizes(net, example))[0] > each * full[0]:
                before, count = channels(net), recipe.neurons_per_round - excess
                if count > 0:
                    net = after_round(net, example, recipe.round_to, count, each * full[0])
                removed = before - channels(net)
                if removed == excess == 0:
                    raise SystemExit(f"{METHOD} stays at {now[0] / full[0]:.1%}; {each:.1%} was asked for")
                excess, rounds = max(0, removed - count), rounds + 1
                made = dataclasses.replace(made, net=net)
                train(made, recipe, 1)
            places[each].mkdir(parents=True, exist_ok=True)
            facts = {
                "method": METHOD, "asked": each, "full_parameters": full[0], "full_macs": full[1], "rounds": rounds,
                "epochs": recipe.warmup_epochs + rounds,
            }  # fmt: skip
            write(places[each] / "rival.json", json.dumps(facts, indent=1) + "\n")
            hgnp.save(net, places[each] / "pruned.safetensors")
            print(f"seed {seed}: {now[0] / full[0]:.2%} of the parameters after {rounds} rounds", flush=True)
    for each, place in places.items():
        if (place / "result.json").is_file():
            continue
        small = hgnp.load(place / "pruned.safetensors", network(config)).to(given.device)
        tuned = dataclasses.replace(made, net=small)
        result = train(tuned, recipe, recipe.finetune_epochs, out=place, resume=True)
        made.config.write(place / "config.yaml")
        print(f"seed {seed}: κ {each:.0%}: {100 * (result.after.metric or 0):.2f} %", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--keep", default="0.1,0.05")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of hgnp run")
    parser.add_argument("--out", type=Path, default=Path("results/cifar10-rivals"))
    given = parser.parse_args()
    if importlib.util.find_spec("torch_pruning") is None:  # before the warm-up is trained
        parser.error("torch-pruning must be installed, got none; pip install --no-deps torch-pruning==1.6.1")
    for seed in map(int, given.seeds.split(",")):
        run([float(each) for each in given.keep.split(",")], seed, given)


if __name__ == "__main__":
    main()
