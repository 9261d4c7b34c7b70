"""From logits to tokens: filters, sampling, and rejection."""
