"""Comparing measured results: those of this tool and, read by importers, those of others."""
