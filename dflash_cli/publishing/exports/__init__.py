"""Exports of measured acceptance for other programs, one format per file."""
