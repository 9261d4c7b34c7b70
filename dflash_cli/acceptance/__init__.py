"""Acceptance statistics: what was measured, how sure it is, and in whose definition."""
