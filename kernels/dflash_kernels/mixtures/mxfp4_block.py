"""The size of a block of MXFP4 numbers, which readers of headers need without torch."""

BLOCK = 32
"""Numbers with one scale."""
