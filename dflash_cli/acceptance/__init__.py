"""Measure acceptance, its confidence intervals, and its value by each project's definition."""
