"""Files this tool writes: complete or absent."""
