"""Dumps of a target's answers and hidden states: a reader for each format, and the writer of our own format."""
