"""Matrix products in 16 bits, and the gates of feed-forward layers."""
