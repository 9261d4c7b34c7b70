"""Recurrent layers: delta rule, short convolutions, and snapshots of states."""
