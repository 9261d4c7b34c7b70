"""Find the best number of draft tokens K, and whether drafting pays."""
