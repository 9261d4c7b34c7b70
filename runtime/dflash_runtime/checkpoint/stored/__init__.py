"""Files of checkpoints: headers, JSON, tensors and digests."""
