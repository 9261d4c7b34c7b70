"""What is chosen and checked before a pair runs, and the loading of a pair."""
