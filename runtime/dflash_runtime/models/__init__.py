"""Target families, one file each; `target.py` holds the registry, `layers.py` the parts they share with drafts."""
