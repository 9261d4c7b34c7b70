"""Targets that run by transformers' code, over our pages or with a cache of their own."""
