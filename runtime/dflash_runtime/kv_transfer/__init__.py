"""Handing requests from an engine that prefills to one that decodes: the payload, and what carries it."""
