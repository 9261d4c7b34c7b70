"""Target families, one file each; `target.py` has the registry, `target_loading.py` loads, `layers.py` has shared parts."""
