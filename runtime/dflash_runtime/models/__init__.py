"""Target families, one file each. `base` holds the registry and the parts they share."""
