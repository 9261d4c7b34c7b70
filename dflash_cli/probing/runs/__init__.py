"""Send all prompts to a server, and measure acceptance from its answers and counters."""
