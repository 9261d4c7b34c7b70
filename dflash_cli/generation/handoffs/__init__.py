"""Answering where another engine has prefilled: hand-offs of `generate`, and the prefill process of an evaluation."""
