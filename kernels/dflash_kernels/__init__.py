"""Kernels of the runtime, one file each, beside the PyTorch references that define them. Imports nothing by itself."""
