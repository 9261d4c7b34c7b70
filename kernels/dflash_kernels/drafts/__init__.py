"""Kernels of drafts: convolutions, walks over candidates, and trees."""
