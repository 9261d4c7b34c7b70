"""Convert drafts: plan a conversion, write the result, verify it, and rename it into its directory."""
