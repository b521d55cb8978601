"""What Γ from the penalised loss does to the radius: DigitsNet on the handwritten digits, trained with each choice.

    python benchmarks/gamma_from.py [--steps 200]

Prints a Markdown table: the median of λ, the median and the largest of λ over λ from C at the same weights, the share of
steps with an active penalty, and C at the end.
"""

import argparse
import statistics
from itertools import islice

import torch

import hgnp
from hgnp.experiments.data import digits
from hgnp.experiments.models import DigitsNet
from hgnp.flatness import step_and_state


def trained(mu: float, bound: float, gamma_from: str, steps: int) -> list[float]:
    torch.manual_seed(0)
    net, data = DigitsNet(), digits(batch=64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    flat = hgnp.Flatness(net, mu=mu, bound=bound, gamma_from=gamma_from)
    plain = hgnp.Flatness(net, mu=mu, bound=bound)  # what C would have said
    directions = [step_and_state(each)[1].direction for each in (flat, plain)]
    radii, ratios, active, losses = [], [], [], []
    batches = (batch for _ in range(steps) for batch in data.train)
    for x, y in islice(batches, steps):
        plain.load_state_dict(flat.state_dict())  # the same v in this step; the next ones may differ
        plain.backward(x, y)
        optimizer.zero_grad()
        losses.append(float(flat.backward(x, y)))
        radii.append(flat.radius)
        active.append(flat.curvature > bound)
        mine, other = (max(float(pair.value) for pair in each.pairs.values()) for each in directions)
        ratios.append(mine / other)
        optimizer.step()
    return [
        statistics.median(radii), statistics.median(ratios), max(ratios), statistics.mean(active),
        statistics.mean(losses[-20:]),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    print("| μ | B | Γ from | λ, median | λ / λ from C, median | the same, largest | active | C at the end |")
    print("|--:|--:|---|--:|--:|--:|--:|--:|")
    for mu, bound in ((1e-3, 0.5), (1e-3, 0.0), (1e-2, 0.0), (1e-1, 0.0)):
        for gamma_from in ("loss", "penalized_loss"):
            radius, ratio, largest, active, loss = trained(mu, bound, gamma_from, args.steps)
            cells = f"{radius:.3g} | {ratio:.3f} | {largest:.3f} | {active:.0%} | {loss:.3f}"
            print(f"| {mu:g} | {bound:g} | {gamma_from} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
