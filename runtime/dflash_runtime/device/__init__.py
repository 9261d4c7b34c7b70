"""What runs on the device: one step, its state, KV and results."""
