"""Steps of a conversion: a request becomes a plan, and a plan is written, read back and renamed into its directory."""
