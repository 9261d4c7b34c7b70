"""The temperature below which decoding is greedy. Imports nothing, so the scheduler reads it without torch."""

MIN_TEMPERATURE = 1e-5
"""A lower temperature separates no more logits, and dividing by it overflows."""
