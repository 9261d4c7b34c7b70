"""Kernels of the runtime. Each file has a kernel, its launcher and the PyTorch reference that defines it."""
