"""Measure a running server: its answers, its counters and the cause of a low acceptance."""
