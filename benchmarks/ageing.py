"""How good the eigenpairs of a step are, and how they age: what renewing v only in every so many steps costs in accuracy.

    python benchmarks/ageing.py --data DIR [--device cuda] [--steps N] [--out benchmarks/ageing.md]

ResNet-18 and VGG-16-BN in training on CIFAR-10 as in the paper (SGD, rate 0.1, batch 128) with v renewed in every step. Now
and then the pairs are set aside, and looked at again when they are k steps old, on the batch of that step: the quotient of the
old v in the factors of that batch against their true top eigenvalue, for the block that was chosen and over all blocks, and the
block that would be chosen now. Age 0 is the batch that the pairs are from: the error of the warm-started iteration alone.
"""

import argparse
import datetime
import itertools
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hgnp.curvature.autodiff.forward import Forward
from hgnp.curvature.collector import FactorCollector
from hgnp.curvature.direction import KroneckerEigenpair
from hgnp.curvature.eigen import top_of_each
from hgnp.curvature.factors import find_blocks
from hgnp.curvature.step import Step, make_step
from hgnp.execution.eager import Eager
from hgnp.experiments.data import cifar10
from hgnp.experiments.models import VGG16, ResNet18
from hgnp.io.atomic import write

NETS = {"ResNet-18": ResNet18, "VGG-16-BN": VGG16}
AGES = (0, 1, 2, 4, 8, 16)
FIRST, EVERY = 60, 30  # the first step that pairs are set aside in, and from one to the next


def factors_of(step: Step, x: Tensor, y: Tensor) -> FactorCollector:
    """The factors of a batch, without a trace."""
    collector = FactorCollector(
        find_blocks(step.net), len(x), kfac_approx=step.choices.kfac_approx, scale_invariant=False, keep_calls=False
    )
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        z = step.passes.run(x, Forward(observer=collector), side_effect_free=True)
        loss = step.loss(z, y)
    collector.collect(loss, None, 1.0)
    return collector


@torch.no_grad()
def compared(collector: FactorCollector, pairs: dict[str, KroneckerEigenpair], chosen: str) -> dict[str, float]:
    """Old pairs in these factors, against the true ones."""
    names = [name for name in pairs if collector.gamma[name].positions]
    psi, gamma = ([side[name].factor() for name in names] for side in (collector.psi, collector.gamma))
    old = [[pairs[name].psi.vector for name in names], [pairs[name].gamma.vector for name in names]]
    true = [top_of_each(factors, starts, cold=True) for factors, starts in zip((psi, gamma), old, strict=True)]
    exact = torch.stack([a.value.max() * b.value.max() for a, b in zip(*true, strict=True)])
    quotients = torch.stack([
        (f.product(v) * v).sum(1).max() * (g.product(w) * w).sum(1).max()
        for f, v, g, w in zip(psi, old[0], gamma, old[1], strict=True)
    ])  # fmt: skip
    mine = names.index(chosen)
    return {
        "of its block": float(1 - quotients[mine] / exact[mine]),
        "all blocks": float((1 - quotients / exact).median()),
        "block": float(exact[mine] / exact.max()),
        "same": float(int(exact.argmax()) == mine),
    }


def studied(
    make: Any, kfac_approx: str, batches: Any, steps: int, device: torch.device
) -> dict[int, list[dict[str, float]]]:
    torch.manual_seed(0)
    net = make().to(device)
    training, state = make_step(net, kfac_approx=kfac_approx)
    executor = Eager(training, state)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    aside: tuple[int, dict[str, KroneckerEigenpair], str] | None = None
    found: dict[int, list[dict[str, float]]] = defaultdict(list)
    for step, (x, y) in enumerate(itertools.islice(batches, steps)):
        before = {name: tensor.clone() for name, tensor in net.named_parameters()}
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            executor.backward(x, y)
        now = state.direction.name()
        if step >= FIRST and (step - FIRST) % EVERY == 0 and now is not None:
            aside = step, state.direction.pairs, now
        if aside is not None and step - aside[0] in AGES:
            assert all(torch.equal(before[name], tensor) for name, tensor in net.named_parameters())
            found[step - aside[0]].append(compared(factors_of(training, x, y), *aside[1:]))
        optimizer.step()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=360)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    lines = [
        "# How eigenpairs age", "",
        f"`python benchmarks/ageing.py --data DIR --device {args.device} --steps {args.steps}`, {datetime.date.today()}, "
        f"{name}, torch {torch.__version__}.", "",
        "Medians (and the worst of ten) over pairs set aside during training. *λ short by*: how much less than the true top "
        "eigenvalue of a batch the quotient of a v that is k steps old is, for the block that was chosen and for the median "
        "block. *Chosen block*: its true λ against the largest of all blocks by then; *still the largest*: how often.", "",
        "| network | factors | age, steps | λ short by, chosen | worst of ten | median block | chosen block's λ / largest "
        "| still the largest |", "|---|---|--:|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for (label, make), kfac_approx in itertools.product(NETS.items(), ("reduce", "expand")):
        data = cifar10(args.data, batch=128, device=device)
        batches = itertools.chain.from_iterable(itertools.repeat(data.train))
        for age, rows in sorted(studied(make, kfac_approx, batches, args.steps, device).items()):
            of = {key: [row[key] for row in rows] for key in rows[0]}
            worst = statistics.quantiles(of["of its block"], n=10)[-1] if len(rows) > 1 else of["of its block"][0]
            lines.append(
                f"| {label} | {kfac_approx} | {age} | {statistics.median(of['of its block']):.1%} | {worst:.1%} "
                f"| {statistics.median(of['all blocks']):.1%} | {statistics.median(of['block']):.2f} "
                f"| {statistics.mean(of['same']):.0%} |"
            )
            print(lines[-1], flush=True)
            if args.out is not None:
                write(args.out, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
