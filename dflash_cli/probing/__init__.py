"""Measuring a running server: what it answers, what it counts, and whose a low acceptance is."""
