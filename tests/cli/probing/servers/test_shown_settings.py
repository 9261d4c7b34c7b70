"""Settings that make verification lossy, in documents of servers."""

from typing import Any

import pytest

from dflash_cli.probing.servers.shown_settings import lossy_settings


@pytest.mark.parametrize(
    ("document", "found"),
    [
        ({"speculative_accept_threshold_single": 0.2}, "speculative_accept_threshold_single 0.2"),
        ({"internal_states": [{"simulate_acc_len": "4"}]}, "simulate_acc_len 4"),
        ({"a": {"rejection_sample_method": "synthetic"}}, "rejection_sample_method synthetic"),
        ({"synthetic_acceptance_rates": [0.8, 0.6]}, "synthetic_acceptance_rates [0.8, 0.6]"),
        ({"speculative_accept_threshold_single": 1.0, "rejection_sample_method": "strict"}, None),
        ({"simulate_acc_len": -1, "synthetic_acceptance_length": None, "speculative_accept_threshold_acc": True}, None),
        ("text", None),
    ],
)
def test_lossy_settings_are_found_in_any_part(document: Any, found: str | None) -> None:
    assert lossy_settings(document) == found
