"""What requests hold on the device: rows of state, KV pages, recurrent states, and results."""
