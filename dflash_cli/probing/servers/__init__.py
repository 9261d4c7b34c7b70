"""How each engine is asked, one file an engine."""
