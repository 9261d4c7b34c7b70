"""Row counts of the captured forwards with prompts. Host only."""

PIECEWISE_ROWS = 768
"""The most rows of a captured forward. With more rows an H200 needs longer to run than the host to launch."""


def bucket_of_rows(num_rows: int) -> int:
    """The bucket of a forward: its rows, padded by fewer than 64."""
    if num_rows <= 32:
        return 16 if num_rows <= 16 else 32
    return -(-num_rows // 64) * 64


def row_buckets(max_rows: int) -> list[int]:
    """All buckets of forwards with up to `max_rows` rows, smallest first."""
    return sorted({bucket_of_rows(count) for count in range(1, min(max_rows, PIECEWISE_ROWS) + 1)})
