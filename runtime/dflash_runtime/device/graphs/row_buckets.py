"""Row counts of the captured forwards with prompts. Host only."""

from dflash_runtime.target_config import TargetConfig

LEAST_ROWS, MOST_ROWS = 768, 2048
"""Captured forwards of large and of small models have at most this many rows."""

LAYER_WEIGHTS = 193e6
"""Weights of a layer of Qwen3-8B. An H200 runs more than `LEAST_ROWS` rows of it longer than the host launches it."""

RECURRENT_LAUNCHES = 1.5
"""Launches of a recurrent layer over launches of a layer with attention."""


def attention_numbers(target: TargetConfig) -> int:
    """Numbers per row around attention: queries, keys, values and the output, of the widest layer."""
    return max((2 * target.num_heads + 2 * count) * size for count, size in target.kv_shapes)


def piecewise_rows(target: TargetConfig) -> int:
    """Return the most rows of a captured forward. They take about the time of launching the next layers."""
    inner = target.intermediate_size
    if target.experts is not None:
        inner = max(inner, target.experts.num_chosen * target.experts.intermediate_size)
    weights = target.hidden_size * (attention_numbers(target) + 3 * inner)
    rows = LEAST_ROWS * LAYER_WEIGHTS / weights * (RECURRENT_LAUNCHES if target.recurrence is not None else 1.0)
    return bucket_of_rows(int(min(max(rows, LEAST_ROWS), MOST_ROWS)))


def bucket_of_rows(num_rows: int) -> int:
    """The bucket of a forward: its rows, padded by fewer than 64."""
    if num_rows <= 32:
        return 16 if num_rows <= 16 else 32
    return -(-num_rows // 64) * 64


def row_buckets(max_rows: int, target: TargetConfig) -> list[int]:
    """All buckets of captured forwards with up to `max_rows` rows, smallest first."""
    return sorted({bucket_of_rows(count) for count in range(1, min(max_rows, piecewise_rows(target)) + 1)})
