"""Results for others to read: reports, a model card's block, and files that engines and collections take."""
