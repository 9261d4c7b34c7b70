"""Checkpoints as files: headers, names, configs, whether a pair fits. Needs no torch."""
