"""The draft/verify runtime: paged KV, scheduling, DFlash drafting, verification and metrics.

Importing the package imports no module of it, so that configs, headers and errors need no torch. Read `llm.py` (the
offline API) or `engine.py` (the step loop) first.
"""
