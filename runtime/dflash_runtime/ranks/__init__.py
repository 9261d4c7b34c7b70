"""Tensor parallelism: the processes that share a target, and the exchange of tensors and messages between them."""
