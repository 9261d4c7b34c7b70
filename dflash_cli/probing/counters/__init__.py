"""Counters of a server: their text, their rise, and whether they agree with the answers."""
