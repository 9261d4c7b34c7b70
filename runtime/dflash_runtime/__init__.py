"""The draft/verify runtime: paged KV, scheduling, DFlash drafting, verification and metrics.

This package imports nothing by itself: configs, headers and errors must be readable without torch.
Start at `llm.py` (the offline API) or `engine.py` (the step loop).
"""
