"""The named, independent choices of the flatness term. docs/flatness.md gives the reason for each default."""

from dataclasses import dataclass, fields, replace

from hgnp.errors import InputError

ALLOWED = {
    "curvature": ("ggn", "hessian"),
    "scaling": ("plain", "scale_invariant"),
    "direction_from": ("last_batch", "this_batch"),
    "kfac_approx": ("reduce", "expand"),
    "fisher_type": ("empirical", "mc"),
    "ranking": ("kfac", "empirical"),
    "gamma_from": ("loss", "penalized_loss"),
}


@dataclass(frozen=True, kw_only=True)
class Choices:
    curvature: str = "ggn"
    """Term: q from Gauss–Newton, or from the full Hessian."""
    scaling: str = "plain"
    """Scaling: v as it is, or each filter's part times the filter's norm."""
    direction_from: str = "last_batch"
    """Direction: the v of the batch before (one pass), or of this batch (two passes, the paper's order)."""
    kfac_approx: str = "reduce"
    """Direction: how Ψ and Γ treat output positions."""
    fisher_type: str = "empirical"
    """Direction: Γ from the batch's labels, or from labels drawn from the network's own output."""
    ranking: str = "kfac"
    """Direction: the block with the largest λ^Ψ λ^Γ, or the largest empirical quotient along its v."""
    gamma_from: str = "loss"
    """Direction: Γ from the derivatives of C, or of L = C + μ·max(0, q − B) along the v of the batch before."""

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


BUNDLES = {
    "default": Choices(),
    "paper": Choices(curvature="hessian", direction_from="this_batch", kfac_approx="expand"),
}


def choose(bundle: str, **given: str | None) -> Choices:
    """The bundle's choices with those given by name in their place."""
    if bundle not in BUNDLES:
        raise InputError(f"flatness must be one of {', '.join(map(repr, BUNDLES))}, got {bundle!r}")
    return replace(BUNDLES[bundle], **{name: value for name, value in given.items() if value is not None})
