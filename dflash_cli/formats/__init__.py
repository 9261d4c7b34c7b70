"""Checkpoint dialects, one file each. `base` holds the protocol and the registry."""
