"""How the stages of a step (`hgnp.curvature.step`) are run: one after the other, or from CUDA graphs."""
