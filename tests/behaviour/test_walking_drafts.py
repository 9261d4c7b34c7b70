"""DFlash 2 and DSpark drafts: the engine's traces equal the plain loop's, and the text equals plain decoding.

Other test files run drafts that walk through the modes of the engine (`walking_drafts.KINDS`).
"""

from itertools import product
from typing import Any

import pytest

from dflash_runtime.scheduling.request import SamplingParams
from dflash_testing.pairs import bundled_llm, bundled_prompts, bundled_target_model
from dflash_testing.plain_loop import plain_loop
from dflash_testing.walking_drafts import KINDS, draft_model

PROMPT = bundled_prompts()[0][:33]
NUM_TOKENS = 24
PARAMS = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
MASKS: dict[str, dict[str, Any]] = {
    "full": {"windows": (None,) * 3, "causal": (False,) * 3},
    "causal": {"windows": (None,) * 3, "causal": (True,) * 3},
    "windows": {"windows": (16,) * 3, "causal": (False,) * 3},
    "causal windows": {"windows": (16,) * 3, "causal": (True,) * 3},
    "mixed": {"windows": (16, None, 5), "causal": (True, False, False)},
}


def mask_of(kind: str, name: str) -> dict[str, Any]:
    """The mask of each layer of a kind of draft."""
    num_layers = draft_model(kind).config.num_layers
    return {field: values[:num_layers] for field, values in MASKS[name].items()}


def trace_of(kind: str, num_drafts: int, **changes: Any) -> tuple[list[int], list[tuple[tuple[int, ...], int]]]:
    (output,) = bundled_llm(draft_model(kind, **changes), num_drafts).generate([PROMPT], PARAMS)
    return list(output.token_ids), [(step.draft_ids, step.num_accepted) for step in output.drafts]


@pytest.mark.parametrize(
    ("kind", "mask"),
    [
        pytest.param(*case, marks=() if case[1] in ("mixed", "causal") else pytest.mark.slow)
        for case in product(KINDS, MASKS)
    ],
)
def test_a_trace_equals_the_plain_loop_under_every_mask(kind: str, mask: str) -> None:
    draft = draft_model(kind, **mask_of(kind, mask))
    text, steps = plain_loop(bundled_target_model(), draft, list(PROMPT), 7, NUM_TOKENS)
    found, found_steps = trace_of(kind, 7, **mask_of(kind, mask))
    assert found == text[:NUM_TOKENS]
    assert found_steps == steps
    assert any(accepted for _, accepted in steps)


@pytest.mark.parametrize("num_drafts", [1, 2, 5, 8, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_equals_the_plain_loop_with_other_block_lengths(kind: str, num_drafts: int) -> None:
    """Fewer or more draft tokens than the draft was trained for."""
    text, steps = plain_loop(bundled_target_model(), draft_model(kind), list(PROMPT), num_drafts, NUM_TOKENS)
    assert trace_of(kind, num_drafts) == (text[:NUM_TOKENS], steps)
