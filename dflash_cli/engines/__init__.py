"""Serving engines, one file each. Only that file depends on the engine."""
