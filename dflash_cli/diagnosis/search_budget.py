"""The budget of a search among readings, and the type of its progress callback."""

from collections.abc import Callable
from dataclasses import dataclass

Observe = Callable[[str, int, int], None]
"""Called with the name of the reading that starts, how many readings are done, and how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchBudget:
    """How much to run.

    num_prompts       prompts that choose a reading
    max_new_tokens    tokens that each prompt is continued by
    start_len         random ids at the start of a prompt, if the user gives no prompts
    lead_len          sampled tokens after the start of a prompt
    num_resamples     resamples of the interval
    factors           the settings to change (`AlternativeReading.factor`); None changes every one
    """

    num_prompts: int = 32
    max_new_tokens: int = 96
    start_len: int = 8
    lead_len: int = 48
    num_resamples: int = 4000
    seed: int = 0
    factors: frozenset[str] | None = None
