"""Readings that only drafts of one family have, one file per family."""
