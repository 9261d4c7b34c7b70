"""Choices and checks before a pair runs, and the loading of a pair."""
