"""The named, independent choices of the flatness penalty. docs/flatness.md gives the reason for each default."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_type_hints

from hgnp.errors import InputError

Curvature = Literal["ggn", "hessian"]
Scaling = Literal["plain", "scale_invariant"]
DirectionFrom = Literal["last_batch", "this_batch"]
KfacApprox = Literal["reduce", "expand"]
FisherType = Literal["empirical", "mc"]
Ranking = Literal["kfac", "empirical"]
GammaFrom = Literal["loss", "penalized_loss"]
DirectionOver = Literal["block", "network"]
Bundle = Literal["default", "paper"]


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The choices of a `Flatness`, validated. `Flatness` explains their values.

    Attributes:
        curvature: q from Gauss–Newton, or from the full Hessian.
        scaling: v as it is, or each filter's part times the filter's norm.
        direction_from: The v of the batch before (one pass), or of this batch (two passes, the paper's order).
        kfac_approx: How Ψ and Γ treat output positions.
        fisher_type: Γ from the batch's labels, or from labels drawn from the network's own output.
        ranking: The block with the largest λ^Ψ λ^Γ, or with the largest Rayleigh quotient vᵀFv, F its empirical
            Fisher matrix.
        gamma_from: Γ from the derivatives of C, or of L = C + μ·max(0, q − B) along the v of the batch before.
        direction_over: K-FAC's eigenvector of one block, or that of the Gauss–Newton matrix over all trained parameters, by
            power iteration.
    """

    curvature: Curvature = "ggn"
    scaling: Scaling = "plain"
    direction_from: DirectionFrom = "last_batch"
    kfac_approx: KfacApprox = "reduce"
    fisher_type: FisherType = "empirical"
    ranking: Ranking = "kfac"
    gamma_from: GammaFrom = "loss"
    direction_over: DirectionOver = "block"

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if given not in ALLOWED[field.name]:
                raise InputError(
                    f"{field.name} must be one of {', '.join(map(repr, ALLOWED[field.name]))}, got {given!r}"
                )
        if self.gamma_from == "penalized_loss":
            for name, needed, why in (
                ("direction_from", "last_batch", "v would need Γ of L along that same v"),
                ("fisher_type", "empirical", "labels are drawn for C alone"),
            ):
                if (given := getattr(self, name)) != needed:
                    raise InputError(
                        f"gamma_from='penalized_loss' must come with {name}={needed!r}, got {given!r}: {why}"
                    )
        if self.direction_over == "network":
            for name, why in (
                ("curvature", "v is the Gauss–Newton matrix's"),
                ("direction_from", "power iteration continues from the v of the batch before"),
                ("scaling", "its metric is per filter"),
                *(
                    (name, "it is a choice for K-FAC")
                    for name in ("kfac_approx", "fisher_type", "ranking", "gamma_from")
                ),
            ):
                if (given := getattr(self, name)) != (needed := ALLOWED[name][0]):
                    raise InputError(f"direction_over='network' must come with {name}={needed!r}, got {given!r}: {why}")


ALLOWED: dict[str, tuple[str, ...]] = {name: get_args(kind) for name, kind in get_type_hints(Choices).items()}
"""Choice → its values."""
BUNDLES = {
    "default": Choices(),
    "paper": Choices(curvature="hessian", direction_from="this_batch", kfac_approx="expand"),
}


def choose(bundle: str, **given: str | None) -> Choices:
    """The bundle's choices with those given by name in their place."""
    if bundle not in BUNDLES:
        raise InputError(f"flatness must be one of {', '.join(map(repr, BUNDLES))}, got {bundle!r}")
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(BUNDLES[bundle], **chosen)
