"""Algorithm 1: the gradient of C + μ·max(0, q − B), where q = vᵀHv and v is the top K-FAC eigenvector.

`step` has the algorithm as stages and is the file to begin with. `collector`, `factors`, `eigen` and `direction` find v;
`autodiff` differentiates q; `device` and `kernels` are for speed. `sam` is another step, `sharpness` a measurement apart.
Nothing here knows of pruning.
"""
