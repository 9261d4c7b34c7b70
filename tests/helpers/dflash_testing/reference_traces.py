"""Traces of z-lab's loop, which shortens its last blocks. This runtime does not."""

from collections.abc import Iterable


def num_whole_steps(acceptance_lengths: Iterable[int], max_new_tokens: int, num_rows: int) -> int:
    """The number of first steps that had at least a whole block of `num_rows` tokens left to generate."""
    generated, count = 1, 0
    for length in acceptance_lengths:
        if max_new_tokens - generated < num_rows:
            break
        generated += length
        count += 1
    return count
