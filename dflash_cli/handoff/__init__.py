"""Hand-offs of requests: of this tool's runs, of an evaluation's prefill process, and between two other servers."""
