"""The draft/verify runtime: paged KV, scheduling, DFlash drafting, verification and metrics.

The package itself imports none of its modules, so code that reads configs or headers never loads torch. Read `llm.py`
(the offline API) or `engine.py` (the step loop) first.
"""
