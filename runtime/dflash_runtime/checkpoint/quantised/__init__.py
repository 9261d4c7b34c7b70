"""Weights of eight and four bits: their forms and scales."""
