"""The confidence of a draft without a confidence head: its largest probability at each position."""

import math
from itertools import product
from typing import Any

import pytest

from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.pairs import always_wrong, bundled_draft_model, bundled_llm, bundled_prompts
from dflash_testing.walking_drafts import ALL, draft_model

SAMPLED = {"temperature": 0.8, "seed": 1}
PROMPT = bundled_prompts()[0][:20]


def test_the_confidence_is_the_largest_probability_of_the_position() -> None:
    """The scripted draft gives one token a logit of 1, and every other token a logit of 0."""
    draft = bundled_draft_model()
    scripted = always_wrong(draft, PROMPT)
    llm = bundled_llm(scripted, 7, draft_confidence=True)
    (output,) = llm.generate([PROMPT], SamplingParams(max_new_tokens=5))
    expected = math.e / (math.e + draft.config.vocab_size - 1)
    assert len(output.draft_confidences) == len(output.drafts) > 0
    for own in output.draft_confidences:
        assert own == pytest.approx([expected] * 7)


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("tiny", {}),
        ("dflash2", SAMPLED),
        *(pytest.param(*item, marks=pytest.mark.slow) for item in product(ALL, [{}, SAMPLED])),
    ],
)
def test_confidences_change_nothing_else(name: str, sampling: dict[str, Any]) -> None:
    params = SamplingParams(max_new_tokens=10, verify_width=5, **sampling)
    way = "probabilistic" if sampling else "greedy"
    number = draft_model(name).config.num_draft_tokens
    asked, silent = (
        bundled_llm(draft_model(name), number, draft_sampling=way, draft_confidence=is_asked).generate([PROMPT], params)
        for is_asked in (True, False)
    )
    assert asked == silent
    assert [len(own) for own in asked[0].draft_confidences] == [4] * len(asked[0].drafts)
    assert all(value is not None and 0 < value <= 1 for own in asked[0].draft_confidences for value in own)
