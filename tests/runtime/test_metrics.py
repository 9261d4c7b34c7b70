"""Acceptance counts under vLLM's names."""

from dflash_runtime.metrics import AcceptanceCounts, count_acceptance
from dflash_runtime.request import FinishReason, RequestOutput


def output(*lengths: int) -> RequestOutput:
    return RequestOutput(
        index=0,
        prompt_token_ids=(1,),
        token_ids=(1,) * (sum(lengths) + 1),
        finish_reason=FinishReason.LENGTH,
        acceptance_lengths=lengths,
        kept_lengths=lengths,
    )


def test_counts_by_hand() -> None:
    counts = count_acceptance([output(1, 4, 2), output(3)], 3)
    assert counts.to_json() == {
        "num_drafts": 4,
        "num_draft_tokens": 12,
        "num_accepted_tokens": 6,
        "acceptance_len": 2.5,
        "draft_tokens_per_step": 3.0,
        "overall_acceptance_rate": 0.5,
        "per_pos_accepted": [3, 2, 1],
        "per_pos_acceptance_rates": [0.75, 0.5, 0.25],
    }


def test_acceptance_length_is_one_plus_the_rates() -> None:
    counts = count_acceptance([output(1, 2, 3, 4, 4), output(2, 2, 1)], 3)
    assert counts.acceptance_len is not None
    assert abs(counts.acceptance_len - 1 - sum(counts.per_pos_acceptance_rates)) < 1e-12


def test_no_steps_give_no_figures() -> None:
    counts = AcceptanceCounts(7)
    assert counts.acceptance_len is None
    assert counts.overall_acceptance_rate is None
    assert counts.per_pos_acceptance_rates == []
