"""Callbacks that report the progress of a conversion."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, the bytes processed since the last call, and the bytes of the whole stage."""


def silent(stage: str, count: int, total: int) -> None:
    """Report nothing."""
