"""Requests, KV pages and the choice of what runs in a step. Host only, no tensors."""
