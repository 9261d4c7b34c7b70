"""A loaded pair, its prompts and its answers."""
