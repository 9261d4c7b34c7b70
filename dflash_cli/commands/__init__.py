"""One file per command: its request class, its function, its output."""
