"""Acceptance counts under vLLM's names."""

from dataclasses import replace

from dflash_runtime.documents import from_json, to_json
from dflash_runtime.errors import InvalidConfig
from dflash_runtime.metrics import AcceptanceCounts, count_acceptance, request_metrics
from dflash_runtime.scheduling.request import FinishReason
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_testing.refusals import refuses


def output(*lengths: int) -> RequestOutput:
    return RequestOutput(
        index=0,
        prompt_token_ids=(1,),
        token_ids=(1,) * (sum(lengths) + 1),
        finish_reason=FinishReason.LENGTH,
        acceptance_lengths=lengths,
        committed_lengths=lengths,
    )


def test_counts_by_hand() -> None:
    counts = count_acceptance([output(1, 4, 2), output(3)], 3)
    assert to_json(counts) == {
        "num_drafts": 4,
        "num_draft_tokens": 12,
        "num_accepted_tokens": 6,
        "acceptance_len": 2.5,
        "is_capped": False,
        "draft_tokens_per_step": 3.0,
        "overall_acceptance_rate": 0.5,
        "per_pos_accepted": [3, 2, 1],
        "per_pos_verified": [4, 4, 4],
        "per_pos_acceptance_rates": [0.75, 0.5, 0.25],
        "metrics": {
            "speculative_decoding": {
                "mean_acceptance_length": 2.5,
                "draft_acceptance_rate": 0.5,
                "acceptance_histogram": [1, 1, 1, 1],
                "num_spec_steps": 4,
                "num_accepted_draft_tokens": 6,
                "num_draft_tokens": 12,
                "num_spec_tokens": 3,
            }
        },
    }


def test_the_metrics_of_a_request_are_those_of_vllm() -> None:
    """Three steps of K = 3, the second one with verify width 2. Only the mean counts bonus tokens."""
    metrics = request_metrics(replace(output(4, 2, 1), verify_widths=(4, 2, 4)), 3)
    assert to_json(metrics) == {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + 4 / 3,
            "draft_acceptance_rate": 4 / 7,
            "acceptance_histogram": [1, 1, 0, 1],
            "num_spec_steps": 3,
            "num_accepted_draft_tokens": 4,
            "num_draft_tokens": 7,
            "num_spec_tokens": 3,
            "per_step_accepted": [3, 1, 0],
            "per_step_drafted": [3, 1, 3],
        }
    }
    without_steps = request_metrics(output(), 3)
    assert without_steps is not None
    assert without_steps.speculative_decoding.mean_acceptance_length == 1.0
    assert without_steps.speculative_decoding.draft_acceptance_rate == 0.0
    assert "per_step_accepted" not in to_json(without_steps)["speculative_decoding"]
    assert request_metrics(output(), 0) is None


def test_an_unverified_draft_does_not_count_as_rejected() -> None:
    """With widths 2, 4 and 3, position 3 was verified once, and accepted."""
    narrow = replace(output(2, 4, 1), verify_widths=(2, 4, 3))
    counts = count_acceptance([narrow], 3)
    assert counts.per_pos_verified == [3, 2, 1]
    assert counts.per_pos_acceptance_rates == [2 / 3, 1 / 2, 1.0]
    assert counts.num_draft_tokens == 6
    assert counts.overall_acceptance_rate == 4 / 6
    assert counts.is_capped
    assert not count_acceptance([output(2, 4, 1)], 3).is_capped
    unseen = count_acceptance([replace(output(2, 1), verify_widths=(2, 2))], 3)
    assert unseen.per_pos_acceptance_rates == [0.5, 0.0, 0.0]


def test_acceptance_length_is_one_plus_the_rates() -> None:
    counts = count_acceptance([output(1, 2, 3, 4, 4), output(2, 2, 1)], 3)
    assert counts.acceptance_len is not None
    assert abs(counts.acceptance_len - 1 - sum(counts.per_pos_acceptance_rates)) < 1e-12


def test_without_steps_there_are_no_rates() -> None:
    counts = AcceptanceCounts(7)
    assert counts.acceptance_len is None
    assert counts.overall_acceptance_rate is None
    assert counts.per_pos_acceptance_rates == []


def test_committed_and_acceptance_lengths_differ_only_in_the_last_step() -> None:
    from dflash_runtime.scheduling.sampling_params import SamplingParams
    from dflash_testing.pairs import bundled_draft_model, bundled_llm, bundled_prompts

    llm = bundled_llm(bundled_draft_model(), 7, max_num_requests=4)
    params = SamplingParams(max_new_tokens=29, stop_token_ids=tuple(range(5, 21)))
    differing = 0
    for found in llm.generate([prompt[:20] for prompt in bundled_prompts()[:12]], params):
        assert found.committed_lengths[:-1] == found.acceptance_lengths[:-1]
        assert sum(found.committed_lengths) + 1 == len(found.token_ids)
        differing += found.committed_lengths[-1:] != found.acceptance_lengths[-1:]
    assert differing > 0


def test_steps_without_drafts_are_not_counted() -> None:
    from dflash_runtime.scheduling.sampling_params import SamplingParams
    from dflash_testing.pairs import bundled_draft_model, bundled_llm, bundled_prompts

    prompt = bundled_prompts()[0][:20]
    plain = bundled_llm(None, 0).generate([prompt], SamplingParams(max_new_tokens=12))
    assert count_acceptance(plain, 0).num_drafts == 0
    near_limit = bundled_llm(bundled_draft_model(), 7, max_model_len=25).generate([prompt], SamplingParams())
    assert len(near_limit[0].token_ids) == 5
    assert count_acceptance(near_limit, 7).num_drafts == 0


def test_counts_are_read_back_and_must_agree_in_length() -> None:
    counts = count_acceptance([output(1, 4, 2), replace(output(3), verify_widths=(3,))], 3)
    written = to_json(counts)
    assert from_json(AcceptanceCounts, written) == counts
    with refuses(InvalidConfig, "wrong-value", field="per_pos_verified", found=[4, 4]):
        from_json(AcceptanceCounts, written | {"per_pos_verified": [4, 4]})
    with refuses(InvalidConfig, "wrong-value", field="num_drafts", found=-1):
        from_json(AcceptanceCounts, written | {"num_drafts": -1})


def test_a_step_with_more_drafts_than_configured_adds_positions() -> None:
    """A server may have a second method of drafting with longer drafts."""
    counts = count_acceptance([output(2, 6, 1)], 3)
    assert (counts.num_accepted_tokens, counts.per_pos_accepted) == (6, [2, 1, 1, 1, 1])
    assert counts.per_pos_verified == [3, 3, 3, 1, 1]
    metrics = request_metrics(output(2, 6, 1), 3)
    assert metrics is not None
    assert metrics.speculative_decoding.per_step_drafted == (3, 5, 3)
    assert metrics.speculative_decoding.acceptance_histogram == [1, 1, 0, 0, 0, 1]


def test_a_narrow_step_says_its_own_width_where_a_longer_one_was_accepted() -> None:
    assert count_acceptance([replace(output(4, 2), verify_widths=(3, 3))], 2).per_pos_verified == [2, 2, 1]
