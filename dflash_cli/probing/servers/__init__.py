"""The protocol of each engine's server, one file per engine."""
