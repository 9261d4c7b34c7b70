"""Spreading the prompts of a run over processes that each have the pair loaded."""
