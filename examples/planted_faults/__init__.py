"""Helpers of `plant_faults.py`: the faults, and what counts as the right thing to say of each."""
