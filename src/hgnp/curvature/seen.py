"""What the last step penalised, and how to read it."""

import math
from dataclasses import dataclass

from torch import Tensor

from hgnp.curvature.blocks import Block
from hgnp.curvature.eigen import kronecker_residual
from hgnp.curvature.late import Late


@dataclass(frozen=True)
class Seen:
    """What a step penalised; its numbers are still on the device."""

    block: Block
    direction: list[Tensor]
    radius: Tensor
    residuals: Tensor
    """Of v^Ψ and v^Γ."""
    curvature: Tensor
    sent: Late | None = None
    """The curvature on its way to the host, if it was sent there at once."""

    @property
    def q(self) -> float:
        """The curvature. Waits for this one number."""
        return (self.sent or Late.of(self.curvature)).item()

    @property
    def residual(self) -> Tensor:
        """Of v. Only whoever asks for it has it computed."""
        return kronecker_residual(*self.residuals.unbind())


class Sight:
    """All that is known of the last step. To ask for a number waits for the device."""

    seen: Seen | None = None

    @property
    def radius(self) -> float:
        """λ of the pair that the last step penalised; not a number before the first."""
        return self._number("radius")

    @property
    def curvature(self) -> float:
        """q = vᵀHv of the last step."""
        return self._number("curvature")

    @property
    def residual(self) -> float:
        """‖(Ψ ⊗ Γ)v − λv‖/λ of that pair."""
        return self._number("residual")

    def _number(self, name: str) -> float:
        return math.nan if self.seen is None else getattr(self.seen, name).item()

    @property
    def block(self) -> str | None:
        """Name of the layer that the last step penalised."""
        return None if self.seen is None else self.seen.block.name

    @property
    def direction(self) -> dict[str, Tensor]:
        """v of the last step (V = diag(n)·v in the scale-invariant metric) by parameter name; zero elsewhere."""
        if self.seen is None:
            return {}
        names = [f"{self.seen.block.name}.{kind}".lstrip(".") for kind in ("weight", "bias")]
        return dict(zip(names, self.seen.direction, strict=False))
