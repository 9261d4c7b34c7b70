"""Files of results, one format a file."""
