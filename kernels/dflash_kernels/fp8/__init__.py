"""Weights in FP8: their form, products, and the rounding of activations."""
