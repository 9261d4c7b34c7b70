"""Helpers of `plant_faults.py`: the faults, and the judgement of findings."""
