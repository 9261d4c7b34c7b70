"""How a conversion reports its progress."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with the stage, the bytes just done and the bytes of the whole stage."""


def silent(stage: str, count: int, total: int) -> None:
    """Report nothing."""
