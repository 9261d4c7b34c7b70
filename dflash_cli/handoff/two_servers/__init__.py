"""Checks of two servers of one engine, one for prefill and one for decode, before they start."""
