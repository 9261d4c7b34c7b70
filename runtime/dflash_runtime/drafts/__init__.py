"""Draft families, one file each. `base` holds the registry."""
