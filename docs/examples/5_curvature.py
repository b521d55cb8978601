"""
Watch the curvature during training
===================================

``Flatness`` measures what it penalises: λ, the largest eigenvalue that K-FAC estimates, the block that has it, and q = vᵀHv
along its eigenvector v. Here they are compared with the top eigenvalue of the Hessian, which ``hgnp.sharpness`` computes.
"""

# %%
# ``bound`` is so high that the penalty is never active: training is plain, and only measured.
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import hgnp

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)

net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
kfac = hgnp.Flatness(net, mu=1.0, bound=1e9)
print(kfac)

# %%
# A second ``Flatness`` has v over the whole network. Its gradients are discarded.
network = hgnp.Flatness(net, mu=1.0, bound=1e9, direction_over="network")

blocks, found = [], []
for _ in range(6):
    for batch in torch.randperm(len(x)).split(128)[:-1]:
        network.backward(x[batch], y[batch])
        optimizer.zero_grad()
        kfac.backward(x[batch], y[batch])
        if len(blocks) % 7 == 0:
            top = hgnp.sharpness(net, [(x[batch], y[batch])]).eigenvalues[0]
            found.append((len(blocks), kfac.radius, kfac.curvature, network.curvature, float(top)))
        blocks.append(kfac.block)
        optimizer.step()

# %%
# K-FAC's direction lies in one layer and carries a part of the top eigenvalue; that of the whole network follows it.
number, radius, along_block, along_network, top = zip(*found, strict=True)
figure, axes = plt.subplots(figsize=(7, 4))
axes.plot(number, top, "k", label="top eigenvalue of the Hessian")
axes.plot(number, along_network, label="q along the network's v")
axes.plot(number, along_block, label="q along K-FAC's v")
axes.plot(number, radius, "--", label="λ of K-FAC")
axes.set_xlabel("step")
axes.legend()
figure.tight_layout()

# %%
# The blocks that had the largest λ, and in how many steps.
print({block: blocks.count(block) for block in dict.fromkeys(blocks)})
