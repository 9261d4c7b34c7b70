"""How much memory there is, and what it is used for."""
