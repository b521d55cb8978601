"""
Which neurons belong together
=============================

Neurons whose channels are added, concatenated or reshaped together are removed together. What hgnp cannot follow is
frozen, with the reason.
"""

# %%
# A residual block with squeeze and excitation, a concatenation, and a convolution whose output is reshaped by a fixed number.
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import hgnp


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.conv1 = nn.Conv2d(16, 24, 3, padding=1)
        self.conv2 = nn.Conv2d(24, 16, 3, padding=1)
        self.squeeze = nn.Linear(16, 4)
        self.excite = nn.Linear(4, 16)
        self.branch = nn.Conv2d(16, 8, 1)
        self.fixed = nn.Conv2d(24, 12, 1)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = F.relu(self.stem(x))
        y = self.conv2(F.relu(self.conv1(x)))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3))))))
        x = F.relu(x + y * gate[:, :, None, None])
        x = torch.cat([x, F.relu(self.branch(x))], 1)
        x = self.fixed(x).view(-1, 12, 64)  # the number is part of the code
        return self.head(x.mean(2))


torch.manual_seed(0)
net, x = Net().eval(), torch.randn(4, 3, 8, 8)
neurons = hgnp.Neurons(net, x)
print(neurons)

# %%
# ``stem``, ``conv2`` and ``excite`` share their 16 channels, so a coupled group counts three neurons.
scores = {layer.name: torch.zeros(layer.alive) for layer in neurons.layers}
scores["stem"][5] = scores["conv2"][5] = scores["excite"][5] = -1.0
selection = neurons.least(scores, 3)
print(selection)

# %%
# Removal equals masking: the smaller network returns what the full one returns with these channels set to zero.
keep = torch.ones(16)
keep[5] = 0


def mask(module, args, output):
    return output * keep[:, None, None]


hooks = [net.stem.register_forward_hook(mask), net.conv2.register_forward_hook(mask)]
with torch.no_grad():
    masked = net(x)
for hook in hooks:
    hook.remove()
neurons.remove(selection)
with torch.no_grad():
    removed = net(x)
print(float((removed - masked).abs().max()))

# %%
# The tensors are smaller, in every layer that reads or writes the channel.
print({name: tuple(parameter.shape) for name, parameter in net.named_parameters() if name.endswith("weight")})

# %%
# Half of what is left, by scores: layers that are coupled stay equally wide.
scores = hgnp.sensitivity(net, neurons, [(x, torch.randint(0, 5, (4,)))])
neurons.remove(neurons.least(scores, neurons.count // 2))
figure, axes = plt.subplots(figsize=(7, 3))
axes.bar(
    [layer.name for layer in neurons.layers],
    [layer.total for layer in neurons.layers],
    color="lightgrey",
    label="before",
)
axes.bar([layer.name for layer in neurons.layers], [layer.alive for layer in neurons.layers], label="after")
axes.set_ylabel("neurons")
axes.legend()
figure.tight_layout()
