"""Prefill on one engine and decode on another: hand-offs of a run, and rules on two servers that hand KV over."""
