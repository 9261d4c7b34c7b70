"""RMS norms, with the sums and gates that they take over."""
