"""
Prune in your own training loop
===============================

``Neurons`` removes neurons from the network and the optimizer, ``Flatness.backward`` replaces ``loss.backward()``.
"""

# %%
# A network with a residual connection on handwritten digits.
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import hgnp

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
x_train, y_train, x_val, y_val = x[:1347], y[:1347], x[1347:], y[1347:]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 96)
        self.second = nn.Linear(96, 96)
        self.last = nn.Linear(96, 10)

    def forward(self, x):
        x = F.relu(self.first(x))
        x = x + F.relu(self.second(x))
        return self.last(x)


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

# %%
# ``first`` and ``second`` are added, so their neurons are removed in pairs. The ten outputs stay.
neurons = hgnp.Neurons(net, x[:2])
print(neurons)

# %%
# After the first epochs, 16 neurons are removed before every other epoch, until 30 % of the parameters are left.
flat = hgnp.Flatness(net, mu=1e-2, bound=0.0)
history = []
for epoch in range(30):
    if epoch >= 5 and epoch % 2 == 0 and neurons.kept > 0.30:
        scores = hgnp.sensitivity(net, neurons, [(x_train[:256], y_train[:256])], flatness=flat)
        neurons.remove(neurons.least(scores, 16), optimizer)
    for batch in torch.randperm(len(x_train)).split(64):
        optimizer.zero_grad()
        flat.backward(x_train[batch], y_train[batch])
        optimizer.step()
    with torch.no_grad():
        accuracy = float((net(x_val).argmax(1) == y_val).float().mean())
    history.append((accuracy, neurons.kept, flat.curvature))

# %%
# The optimizer's momentum was cut with the weights.
for parameter, state in optimizer.state.items():
    assert state["momentum_buffer"].shape == parameter.shape
print(neurons)

# %%
# The penalised curvature q = vᵀHv is measured in every step; here is that of each epoch's last one.
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
left.plot([100 * accuracy for accuracy, _, _ in history], label="accuracy, %")
left.plot([100 * kept for _, kept, _ in history], label="parameters kept, %")
right.semilogy([max(q, 1e-6) for _, _, q in history], label="curvature q along v")
for axes in (left, right):
    axes.set_xlabel("epoch")
    axes.legend()
figure.tight_layout()
