"""Curvature of the loss: Kronecker factors, their top eigenpairs, the block they point to, and q = vᵀHv along it.

In the order of a step: `blocks` (which layers), `forward` (the network's pass, watched), `factors` and `eigen` (Ψ, Γ and
their eigenpairs), `spectrum` (all blocks' pairs and which is largest), `direction` (v, kept from batch to batch),
`gauss_newton` (q by `tangent` and `losses`) and `hessian` (q by the other route), with `norms` and `operations` beneath
them. Nothing here knows of pruning.
"""
