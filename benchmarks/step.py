"""Time and peak memory of a training step with the flatness penalty, against a plain step.

    python benchmarks/step.py [--nets resnet18 vgg16] [--batch 32] [--threads 2] [--device cpu|cuda] [--naive] [--bf16]
                              [--cpu-time]

One row per network and penalised block: last, middle and first (eigenpairs of all blocks included, penalty active), and
"picked", the blocks that steps of a real run choose. `--naive` adds the textbook way: dense factors and `eigh` for
every block, then a triple backward. Medians over interleaved repeats; memory is the peak above what is held before.
`--cpu-time` counts the process's own processor time, for a machine that is shared; use it with one thread.
"""

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from hgnp import Flatness
from hgnp.curvature.factors import find_blocks
from hgnp.reference import penalized_loss
from nets import NETS

Step = Callable[[], object]


def peak(step: Step, net: nn.Module, device: torch.device) -> float:
    """Peak memory of a step in MiB above what is held before it, gradients not among that."""
    net.zero_grad()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - held) / 2**20
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = [0, *itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))]
    return max(held) / 2**20


def timed(step: Step, device: torch.device, clock: Callable[[], float]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = clock()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def measure(name: str, args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    torch.manual_seed(0)
    make, shape = NETS[name]
    net = make().to(device)
    x, y = torch.randn(args.batch, *shape, device=device), torch.randint(0, 10, (args.batch,), device=device)
    flat = Flatness(net, bound=-1.0)
    half = torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.bf16)

    def plain() -> None:
        net.zero_grad()
        with half:
            loss = F.cross_entropy(net(x), y)
        loss.backward()

    def penalised(block: str | None) -> Step:
        def step() -> None:
            if block is not None:
                flat.load_state_dict(flat.state_dict() | {"block": block})
            net.zero_grad()
            with half:
                flat.backward(x, y)

        return step

    blocks = [block.name for block in find_blocks(net)]
    penalised(None)()
    steps: dict[str, Step] = {
        "plain": plain,
        f"last ({blocks[-1]})": penalised(blocks[-1]),
        f"middle ({blocks[len(blocks) // 2]})": penalised(blocks[len(blocks) // 2]),
        f"first ({blocks[0]})": penalised(blocks[0]),
        "picked": penalised(None),
    }
    if args.naive:
        # timed once: it takes minutes on a CPU
        steps["naive"] = lambda: (net.zero_grad(), penalized_loss(net, x, y).objective.backward())
    times: dict[str, list[float]] = {label: [] for label in steps}
    for label, step in steps.items():
        if label != "naive":
            step()
    for repeat in range(args.repeats):
        for label, step in steps.items():
            if label != "naive" or repeat == 0:
                times[label].append(timed(step, device, time.process_time if args.cpu_time else time.perf_counter))
    memory = {label: peak(step, net, device) for label, step in steps.items()}
    base = statistics.median(times["plain"])
    for label in steps:
        seconds = statistics.median(times[label])
        picked = f"  picked {flat.block}" if label == "picked" else ""
        print(
            f"{name:9} {label:22} {seconds * 1e3:10.1f} ms {seconds / base:6.2f}x "
            f"{memory[label]:9.0f} MiB {memory[label] / memory['plain']:6.2f}x{picked}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--naive", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.device}, batch {args.batch}, {args.threads} threads, bf16 {args.bf16}")
    for name in args.nets:
        measure(name, args)


if __name__ == "__main__":
    main()
