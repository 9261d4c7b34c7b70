"""References, checkpoint files, headers, digests and locks."""
