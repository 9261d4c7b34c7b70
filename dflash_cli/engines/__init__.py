"""Serving engines, one file each: what is known of them and nothing else."""
