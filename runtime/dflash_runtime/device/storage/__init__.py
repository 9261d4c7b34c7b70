"""Data of requests on the device: rows of state, KV pages, recurrent states, and results."""
