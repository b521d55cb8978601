"""The demo against the same network trained unpruned for as many epochs, over seeds.

python benchmarks/demo.py --out benchmarks/demo.md

Every run is a process of its own, `hgnp run demo`, as a user starts it; its wall time counts from there.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch


def hgnp_run(folder: Path, *arguments: str) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "hgnp",
        "run",
        "demo",
        "--out",
        str(folder),
        "--device",
        "cpu",
        "--json",
        *arguments,
    ]
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**result, "wall": time.perf_counter() - start}


def unpruned(epochs: int) -> list[str]:
    """Settings for as many epochs with nothing pruned; the fine-tuning, with its falling rate, is as long as the demo's."""
    from hgnp.experiments.presets import preset

    finetune = preset("demo").recipe["finetune_epochs"]
    return ["--set", "recipe.keep=1", "--set", f"recipe.warmup_epochs={epochs - finetune}"]


def measure(seeds: int, work: Path) -> tuple[list[str], dict[str, float]]:
    lines, pairs = [], []
    for seed in range(seeds):
        small = hgnp_run(work / f"demo-{seed}", "--seed", str(seed))
        full = hgnp_run(work / f"full-{seed}", "--seed", str(seed), *unpruned(small["epochs"]))
        plain = hgnp_run(
            work / f"plain-{seed}", "--seed", str(seed), *unpruned(small["epochs"]), "--set", "recipe.mu=0"
        )
        if {full["epochs"], plain["epochs"]} != {small["epochs"]}:
            raise SystemExit(f"{full['epochs']} epochs unpruned, {small['epochs']} pruned: not comparable")
        speed = small["before"]["latency_ms"] / small["after"]["latency_ms"]
        pairs.append((small, full, plain, speed))
        lines.append(
            f"| {seed} | {small['target']['got']:.2%} | {small['after']['metric']:.2%} | {full['after']['metric']:.2%} | "
            f"{plain['after']['metric']:.2%} | {small['epochs']} | "
            f"{small['before']['latency_ms']:.2f} → {small['after']['latency_ms']:.2f} | "
            f"{speed:.1f}× | {small['wall']:.0f} s |"
        )
        print(lines[-1], flush=True)
    means = {
        "kept": max(small["target"]["got"] for small, _, _, _ in pairs),
        "gain": statistics.mean(small["after"]["metric"] - full["after"]["metric"] for small, full, _, _ in pairs),
        "over_plain": statistics.mean(
            small["after"]["metric"] - plain["after"]["metric"] for small, _, plain, _ in pairs
        ),
        "speed": statistics.mean(speed for _, _, _, speed in pairs),
        "wall": max(small["wall"] for small, _, _, _ in pairs),
    }
    return lines, means


def points(difference: float) -> str:
    return f"{100 * difference:+.2f}".replace("-", "−")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        lines, means = measure(arguments.seeds, Path(work))
    report = "\n".join([
        "# The demo",
        "",
        f"`python {' '.join(sys.argv)}`, {datetime.date.today()}, {platform.machine()} with {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} in use, torch {torch.__version__}.",
        "",
        "*Unpruned* is the same network, data, seed and number of epochs with `keep: 1`; *plain* has `mu: 0` too. "
        "Latency is that of 256 images"
        ", the full and the pruned network timed alternately. Wall time is that of `hgnp run`, from start to exit.",
        "",
        "| seed | kept | accuracy | unpruned | plain | epochs | ms | faster | wall |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        *lines,
        "",
        f"Kept at most {means['kept']:.2%}; accuracy on average {points(means['gain'])} points from the unpruned network's "
        f"and {points(means['over_plain'])} from the plain one's; "
        f"on average {means['speed']:.1f} times faster; at most {means['wall']:.0f} s.",
        "",
    ])  # fmt: skip
    print(report)
    if arguments.out:
        temporary = arguments.out.with_suffix(".tmp")
        temporary.write_text(report, encoding="utf-8")
        temporary.replace(arguments.out)


if __name__ == "__main__":
    main()
