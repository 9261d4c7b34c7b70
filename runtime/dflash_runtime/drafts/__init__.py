"""Draft families, one file each; `draft.py` holds the registry."""
