"""Forwards and steps as CUDA graphs."""
