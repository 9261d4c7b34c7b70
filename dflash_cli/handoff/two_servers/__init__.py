"""Two servers of one engine, one for prompts and one for decoding: how they are started, and what is known to fail."""
