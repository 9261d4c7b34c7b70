"""Hand-offs of requests from a prefill engine to a decode engine: the payload, and the connectors that carry it."""
