"""Curvature of the loss: Kronecker factors, their top eigenpairs, the block they point to, and q = vᵀHv along it.

In the order of a step: `blocks` (which layers), `forward` (the network's pass, watched), `factors` and `eigen`
(Ψ, Γ and their eigenpairs), `tangent` and `losses` (the Gauss–Newton route), `hessian` (the other route),
with `norms` and `operations` beneath them. Nothing here knows of pruning.
"""
