"""Parts of `step_time.py` and `load.py`: random pairs, arms, accounting of time, and reports."""
