"""Which layers are blocks of the curvature, and the shapes of their factors.

A block is the weight of one Linear or Conv1d/2d/3d with its bias as homogeneous coordinate. Block l of a layer with G
groups has G pairs of factors: Ψ of side d (+1 with a bias), d = C_in/G·kernel, and Γ of side C_out/G.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, eq=False)
class Block:
    name: str
    layer: nn.Module

    @property
    def weight(self) -> Tensor:
        return self.layer._parameters["weight"]  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        """The bias where it is trained: a frozen one is a constant, no coordinate of the curvature."""
        bias = self.layer._parameters.get("bias")
        return bias if bias is not None and bias.requires_grad else None

    @property
    def groups(self) -> int:
        return getattr(self.layer, "groups", 1)

    @property
    def psi_shape(self) -> tuple[int, int]:
        return self.groups, self.weight[0].numel() + (self.bias is not None)

    @property
    def gamma_shape(self) -> tuple[int, int]:
        return self.groups, self.weight.shape[0] // self.groups

    def filter_norms(self) -> Tensor:
        """n_j = ‖w_j‖, one a filter, attached to the weight."""
        return torch.linalg.vector_norm(self.weight.flatten(1), dim=1)

    def spread(self, psi: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor | None]:
        """v^Ψ ⊗ v^Γ of each group as tangents of the weight and of the bias."""
        outer = gamma.unsqueeze(2) * psi.unsqueeze(1)  # (G, C_out/G, d [+ 1])
        if self.bias is None:
            return outer.reshape(self.weight.shape), None
        return outer[..., :-1].reshape(self.weight.shape), outer[..., -1].reshape(-1)


def find_blocks(net: nn.Module) -> list[Block]:
    """The trained Linear and convolution layers, in the network's order; a weight shared by two layers is one block."""
    blocks: dict[int, Block] = {}
    for name, layer in net.named_modules():
        if isinstance(layer, LAYERS):
            weight = layer._parameters.get("weight")  # None where a parametrization computes it
            if weight is not None and weight.requires_grad:
                blocks.setdefault(id(weight), Block(name, layer))
    return list(blocks.values())
