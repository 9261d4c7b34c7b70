"""Checkpoints as files: headers, tensor names, configs, and the fit of a draft and a target. Needs no torch."""
