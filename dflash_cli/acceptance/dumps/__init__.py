"""Dumps: what a target said and its hidden states while it did; one file a format, and the writer of ours."""
