"""Triton kernels, where they work (`support`); PyTorch's own operations do the same elsewhere."""
