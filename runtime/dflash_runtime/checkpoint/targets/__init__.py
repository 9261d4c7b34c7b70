"""Configs of targets, and whether a target runs here."""
