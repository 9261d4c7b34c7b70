"""Typer made ours: commands imported when they are asked for, values read from text, help that fits a screen."""
