"""Target families, one file each; `target.py` has the registry, `layers.py` the parts that drafts share."""
