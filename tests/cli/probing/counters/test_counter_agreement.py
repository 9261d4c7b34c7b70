"""Requests of other clients, and counters that count wrongly."""

from typing import Any

import pytest

from dflash_cli.probing.counters.counter_agreement import Answered, describe_odd, is_of_others
from dflash_cli.probing.counters.server_counters import ServerCounters

OWN = Answered(num_answers=10, num_tokens=640, num_prompt_tokens=900)
SOUND_RISE: dict[str, Any] = {
    "num_drafts": 200, "num_draft_tokens": 1400, "num_accepted_tokens": 430, "per_pos_accepted": (180, 150, 100),
    "num_requests": 10, "num_tokens": 640,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words", "is_foreign"),
    [
        ({}, "", False),
        ({"num_tokens": 640 + 970}, "rejected draft tokens", False),
        ({"num_tokens": 640 + 1400}, "answers and draft tokens", False),
        ({"num_tokens": 640 + 900}, "prompts and answers", False),
        ({"num_tokens": 200}, "verify steps", False),
        ({"num_tokens": 900, "num_requests": None}, "", True),
        ({"num_tokens": 640 + 970, "num_requests": None}, "rejected draft tokens", False),
        ({"num_requests": 20}, "20 requests", False),
        ({"num_requests": 12}, "", True),
        ({"num_requests": 20, "num_tokens": 1280}, "", True),
        ({"num_drafts": 400, "num_tokens": 1280}, "", True),
        ({"num_drafts": 400}, "400 steps", False),
    ],
)
def test_one_counter_that_differs_is_wrong_and_several_are_of_other_clients(
    changes: dict[str, Any], words: str, is_foreign: bool
) -> None:
    risen = ServerCounters(**SOUND_RISE | changes)
    odd = describe_odd(risen, OWN)
    assert (bool(odd), is_of_others(risen, OWN)) == (bool(words), is_foreign)
    assert words in (odd or "")
    assert describe_odd(risen, OWN) is None or not is_of_others(risen, OWN)
