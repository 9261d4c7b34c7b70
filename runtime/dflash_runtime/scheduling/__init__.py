"""Requests, pages and what runs in a step. Host only, no tensors."""
