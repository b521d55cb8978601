"""Algorithm 1: the gradient of C + μ·max(0, q − B), where q = vᵀHv and v is the top K-FAC eigenvector.

`step` has the algorithm as stages and is the file to begin with. `moments`, `factors`, `eigen` and `direction` find v;
`autodiff` differentiates q; `device` and the Triton kernels (`fused`, `fused_patches`, `compiled`) are for speed.
`sharpness` is a measurement apart. Nothing here knows of pruning.
"""
