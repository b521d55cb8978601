"""
Train and prune in one call
===========================

``hgnp.prune`` trains a network and removes neurons between epochs until the target is met.
"""

# %%
# Any ``nn.Module`` and any loader of ``(inputs, target)`` batches will do.
import tempfile

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import hgnp

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))
train, val = random_split(data, [1347, 450])
train_loader, val_loader = DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=450)


def conv(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


def make_net():
    return nn.Sequential(
        conv(1, 32),
        conv(32, 64),
        nn.MaxPool2d(2),
        conv(64, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


net = make_net()

# %%
# After three epochs, one round before each epoch removes the 20 least important neurons of the whole network. Once a tenth of
# the parameters is left, five epochs of fine-tuning follow.
recipe = hgnp.Recipe(
    keep=0.10, warmup_epochs=3, prune_every=1, neurons_per_round=20, finetune_epochs=5, lr=0.05, seed=0
)
result = hgnp.prune(net, train_loader, val_loader, recipe=recipe, verbose=False)
print(result)

# %%
# ``net`` was pruned in place. It is the same class with smaller tensors.
print(net)

# %%
# ``history`` has one row per epoch.
epochs = [row["epoch"] for row in result.history]
figure, axes = plt.subplots(figsize=(7, 3.5))
axes.plot(epochs, [100 * row["metric"] for row in result.history], label="accuracy, %")
axes.plot(epochs, [100 * row["kept"] for row in result.history], label="parameters kept, %")
axes.set_xlabel("epoch")
axes.legend()
figure.tight_layout()

# %%
# Saved weights load into a fresh instance of the full-size class, and outputs are bit-equal.
with tempfile.TemporaryDirectory() as folder:
    result.save(folder)
    loaded = hgnp.load(folder, make_net())
x = torch.stack([image for image, _ in val])
with torch.no_grad():
    print(torch.equal(loaded.eval()(x), net.eval()(x)))
