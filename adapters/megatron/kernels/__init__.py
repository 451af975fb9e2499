"""Triton kernels of the training side. Each module is imported where it runs: on CUDA, which brings Triton."""
