"""
Prune a trained network once, and re-estimate its statistics
============================================================

Without any further training, a network with batch norms loses most of its accuracy because the norms' running statistics no
longer fit. ``hgnp.recalibrate`` estimates them again.
"""

# %%
# Train a network on handwritten digits.
import copy

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import hgnp

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
train, val = list(zip(x[:1344].split(64), y[:1344].split(64), strict=True)), (x[1344:], y[1344:])


def conv(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


net = nn.Sequential(
    conv(1, 32), conv(32, 64), nn.MaxPool2d(2), conv(64, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
for _ in range(8):
    for inputs, target in train:
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), target).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(net):
    return float((net.eval()(val[0]).argmax(1) == val[1]).float().mean())


print(f"{accuracy(net):.1%}")

# %%
# One half of the neurons: ``preview`` tells what would be left and changes nothing.
neurons = hgnp.Neurons(net, x[:2])
scores = hgnp.sensitivity(net, neurons, train)
print(neurons.preview(neurons.least(scores, neurons.count // 2)))

# %%
# Copies of the trained network, cut by different amounts.
shares = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
cut, recalibrated = [], []
for share in shares:
    small = copy.deepcopy(net)
    its_neurons = hgnp.Neurons(small, x[:2])
    its_neurons.remove(its_neurons.least(scores, round(share * its_neurons.count)))
    cut.append(accuracy(small))
    hgnp.recalibrate(small, train)
    recalibrated.append(accuracy(small))

figure, axes = plt.subplots(figsize=(7, 3.5))
axes.plot([100 * share for share in shares], [100 * value for value in recalibrated], "o-", label="recalibrated")
axes.plot([100 * share for share in shares], [100 * value for value in cut], "o-", label="cut alone")
axes.axhline(100 * accuracy(net), color="grey", linewidth=1, label="the trained network")
axes.set_xlabel("neurons removed, %")
axes.set_ylabel("accuracy, %")
axes.legend()
figure.tight_layout()
