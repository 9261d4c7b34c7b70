"""Checkpoint dialects, one file each. `dialect` holds the protocol and the registry."""
