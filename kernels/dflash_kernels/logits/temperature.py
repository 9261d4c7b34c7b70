"""The temperature below which decoding is greedy. Imports nothing, so the scheduler reads it without torch."""

MIN_TEMPERATURE = 1e-5
"""At lower temperatures a sample is the argmax anyway, and dividing logits by them may overflow."""
