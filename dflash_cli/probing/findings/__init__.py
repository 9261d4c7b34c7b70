"""Faults and facts about a server: one file for each class, and the cause of a low acceptance."""
