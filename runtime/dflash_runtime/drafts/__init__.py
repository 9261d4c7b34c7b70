"""Draft families, one file each; `draft.py` has the registry."""
