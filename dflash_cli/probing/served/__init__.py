"""The answers of a server as it gave them, and the comparison of their tokens."""
