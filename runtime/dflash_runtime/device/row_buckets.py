"""How many rows the captured forwards with prompts have. Host only."""

PIECEWISE_ROWS = 768
"""Rows up to which forwards with prompts are captured: about so many an H200 runs while the host launches them."""


def bucket_of_rows(num_rows: int) -> int:
    """The rows that so many are filled up to, fewer than 64 more."""
    if num_rows <= 32:
        return 16 if num_rows <= 16 else 32
    return -(-num_rows // 64) * 64


def row_buckets(max_rows: int) -> list[int]:
    """All buckets of steps with up to so many rows, the smallest first."""
    return sorted({bucket_of_rows(count) for count in range(1, min(max_rows, PIECEWISE_ROWS) + 1)})
