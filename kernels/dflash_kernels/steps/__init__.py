"""Both ends of a step: rows, slots and widths of the requests in a batch."""
