"""Sequential networks, and norms that mix channels."""

import torch
from torch import nn

from cases.case import block, case, conv, head, tokens

# Plain


@case("4", example=lambda: torch.randn(6, 5, dtype=torch.double))
def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6, bias=False), nn.GELU(), nn.Linear(6, 3))


@case("7", example=lambda: torch.randn(6, 5, dtype=torch.double))
def mlp_with_norms_and_odd_activations() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Sigmoid(), nn.Linear(7, 6), nn.Softplus(), nn.PReLU(6),
        nn.Dropout(0.0), nn.Linear(6, 3),
    )  # fmt: skip


@case("6")
def vgg_like() -> nn.Module:
    return nn.Sequential(
        block(3, 6), nn.MaxPool2d(2), block(6, 8), nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(0.0), nn.Linear(32, 4)
    )


@case("4", example=lambda: torch.randn(3, 2, 9, dtype=torch.double))
def conv1d() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(18, 4))


@case("5", example=lambda: torch.randn(2, 2, 5, 5, 5, dtype=torch.double))
def conv3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 6, 3), nn.BatchNorm3d(6), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(6, 5), nn.Linear(5, 4)
    )


@case("4")
def transposed() -> nn.Module:
    return nn.Sequential(
        conv(3, 6), nn.ReLU(), nn.ConvTranspose2d(6, 5, 2, stride=2), nn.BatchNorm2d(5), nn.ConvTranspose2d(5, 2, 3)
    )


@case("3.2")
def instance_norm() -> nn.Module:
    return nn.Sequential(
        conv(3, 6), nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
        nn.Sequential(conv(6, 5), nn.InstanceNorm2d(5)), head(5),
    )  # fmt: skip


@case("8", example=lambda: torch.randn(2, 3, 8, dtype=torch.double))
def every_activation() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 6, 3), nn.LeakyReLU(), nn.Conv1d(6, 6, 1), nn.Hardswish(), nn.Conv1d(6, 6, 1),
        nn.Sequential(nn.SiLU(), nn.Mish(), nn.ELU(), nn.CELU(), nn.SELU(), nn.Softsign(), nn.Tanhshrink(), nn.RReLU(0.2, 0.2)),
        nn.Conv1d(6, 6, 1),
        nn.Sequential(nn.ReLU6(), nn.Hardtanh(), nn.Softshrink(0.1), nn.Hardshrink(0.1), nn.Threshold(0.1, 0.0)),
        nn.Conv1d(6, 2, 1),
    )  # fmt: skip


# Norms over channels


@case("0", "4.2")
def group_norm() -> nn.Module:
    return nn.Sequential(conv(3, 8), nn.GroupNorm(4, 8), nn.ReLU(), block(8, 5), head(5))


@case("3")
def group_norm_of_single_channels() -> nn.Module:
    return nn.Sequential(conv(3, 6), nn.GroupNorm(6, 6), nn.Tanh(), conv(6, 2))


@case("0", "5", example=lambda: tokens())
def layer_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 6), nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5), nn.Linear(5, 2)
    )


@case("0", "5", example=lambda: tokens())
def rms_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 6), nn.RMSNorm(6), nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 5), nn.Linear(5, 2))


@case("4.2", approximate=True)
def group_norm_approximate() -> nn.Module:
    return nn.Sequential(conv(3, 8), nn.GroupNorm(4, 8), nn.ReLU(), block(8, 5), head(5))


@case("3", example=lambda: tokens(), approximate=True)
def layer_norm_approximate() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 6), nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 2))


@case("3", example=lambda: tokens(), approximate=True)
def rms_norm_approximate() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 6), nn.RMSNorm(6), nn.Linear(6, 8), nn.Linear(8, 2))
