"""Importers of result files, one format per file."""
