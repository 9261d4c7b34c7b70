"""Write K and V rows into their slots.

Axis letters: T rows, S slots, KV heads of keys and values, D head dim.
"""

from torch import Tensor


def kv_store_ref(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Store rows in place; rows whose slot is PAD (negative) are dropped.

    keys, values             [T, KV, D]
    key_cache, value_cache   [S, KV, D]   written
    slots                    [T] int64
    """
    rows = (slots >= 0).nonzero(as_tuple=True)[0]
    key_cache.index_copy_(0, slots[rows], keys[rows])
    value_cache.index_copy_(0, slots[rows], values[rows])
