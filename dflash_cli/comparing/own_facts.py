"""The settings of our own results, under one name each: files of answers and JSON documents state them differently."""

from collections.abc import Mapping
from typing import Any

WRITTEN_IF_CHOSEN = {
    "kv_dtype": "auto", "drafting": "model", "draft_confidence": False, "row_budget": False, "num_tree_nodes": None,
    "tree_candidates": None, "tensor_parallel_size": 1, "module_swaps": True, "recurrent_rows": "auto", "layout": None,
}  # fmt: skip
"""Settings that a file of answers lacks if they have these values, and values that a JSON document may lack."""

SAID_OTHERWISE = frozenset({"tree", "tensor_parallel"})
"""Options in a JSON document that a setting of the engine states too: num_tree_nodes, tensor_parallel_size."""


def own_facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run so that equal runs have equal settings in both kinds of files."""
    stated = {name: value for name, value in settings.items() if name not in SAID_OTHERWISE}
    return {**WRITTEN_IF_CHOSEN, **stated}
