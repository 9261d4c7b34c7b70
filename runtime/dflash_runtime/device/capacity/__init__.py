"""Memory of the host and the device, and its division."""
