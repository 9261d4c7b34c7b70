"""What `step_time.py` and `load.py` are made of: random pairs, arms, the accounting of time, and the report."""
