"""How many distinct prompts an interval and a test need. Every command follows these numbers.

A sample can lack a kind of prompt, and nothing in the sample shows it. Of 100 samples of 64 prompts, 4 lack a kind
that makes up 5% of all prompts; of 100 samples of 16 prompts, 44 do. Then no interval from the sample covers the
truth, and an interval with room for every such kind says nothing. So smaller samples get no interval, and the result
says why (docs/explanation/statistics.md).

A test asks less: may luck alone explain the difference on these prompts? It needs enough prompts for its own error
rate only.
"""

from dflash_runtime.notices import Notice
from dflash_runtime.phrases import plural

MIN_FOR_INTERVAL = 64
"""Fewest distinct prompts with an interval. With fewer, 6% of looping answers make intervals cover too rarely."""
MIN_FOR_TEST = 12
"""Fewest distinct prompts with a test. Tests of fewer prompts are wrong too often, or find nothing."""


def why_no_interval(num_prompts: int, least: int = MIN_FOR_INTERVAL) -> Notice | None:
    """Return why this number of distinct prompts is too small for an interval, or None."""
    return _too_few(num_prompts, least, "an interval")


def why_no_test(num_prompts: int, least: int = MIN_FOR_TEST) -> Notice | None:
    """Return why this number of distinct prompts is too small for a test of two results, or None."""
    return _too_few(num_prompts, least, "a test")


def _too_few(num_prompts: int, least: int, what: str) -> Notice | None:
    if num_prompts >= least:
        return None
    if not num_prompts:
        return Notice("no verify steps", id="no-steps")
    text = f"{plural(num_prompts, 'distinct prompt')}, and {what} needs {least} or more"
    return Notice(text, id="too-few-prompts")
