"""DFlash 2 and DSpark drafts: the engine's traces equal the plain loop's, and the text equals plain decoding.

Other test files run drafts that walk through the modes of the engine (`walking_drafts.KINDS`).
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from dflash_cli.acceptance.draft_confidence import find_confidence
from dflash_cli.checkpoints.opening import open_draft
from dflash_runtime.drafts.dflash import DFlashDraft
from dflash_runtime.drafts.draft import load_draft_weights
from dflash_runtime.drafts.dspark import DSparkDraft
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import UsageError
from dflash_runtime.scheduling.limits import resolve_num_drafts
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.lifted_drafts import Spark, confidence_tensors
from dflash_testing.pairs import bundled_llm, bundled_prompts, bundled_target_model, placement
from dflash_testing.plain_loop import plain_loop
from dflash_testing.refusals import refuses
from dflash_testing.walking_drafts import KINDS, draft_model, walking_folder
from dflash_testing.widths import ListedWidths

PREDICTING = [kind for kind, case in KINDS.items() if isinstance(case, Spark)]
"""Drafts with a confidence head."""

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
    [pytest.param(*case, marks=() if case[1] == "mixed" else pytest.mark.slow) for case in product(KINDS, MASKS)],
)
def test_a_trace_equals_the_plain_loop_under_every_mask(kind: str, mask: str) -> None:
    draft = draft_model(kind, **mask_of(kind, mask))
    text, steps = plain_loop(bundled_target_model(), draft, list(PROMPT), 7, NUM_TOKENS)
    found, found_steps = trace_of(kind, 7, **mask_of(kind, mask))
    assert found == text[:NUM_TOKENS]
    assert found_steps == steps
    assert any(accepted for _, accepted in steps)


@pytest.mark.parametrize("num_drafts", [1, 11, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 5, 8))])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_equals_the_plain_loop_with_other_block_lengths(kind: str, num_drafts: int) -> None:
    """Fewer or more draft tokens than the draft was trained for."""
    text, steps = plain_loop(bundled_target_model(), draft_model(kind), list(PROMPT), num_drafts, NUM_TOKENS)
    assert trace_of(kind, num_drafts) == (text[:NUM_TOKENS], steps)


@pytest.mark.parametrize("kind", PREDICTING)
def test_confidences_do_not_depend_on_the_mode(kind: str) -> None:
    """In batches, chunks and steps of changing widths, sampled or not, the confidences of a block stay the same."""
    prompts = [prompt[:length] for prompt, length in zip(bundled_prompts(), (5, 17, 33), strict=False)]
    params = [SamplingParams(max_new_tokens=9, temperature=temperature, seed=1) for temperature in (0.0, 0.9, 0.0)]
    draft = draft_model(kind, torch.float64)
    settings: dict[str, Any] = {"dtype": torch.float64, "draft_sampling": "probabilistic"}
    alone = bundled_llm(draft, 7, **settings).generate(prompts, params)
    batched = bundled_llm(draft, 7, scheduling="async", max_num_requests=3, max_batched_tokens=24, **settings)
    narrow = bundled_llm(draft, 7, max_num_requests=2, **settings)
    narrow.engine.scheduler.width_policy = ListedWidths([8, 3, 1, 5] * 10)
    for one, two in zip(alone, batched.generate(prompts, params), strict=True):
        assert [len(values) for values in one.draft_confidences] == [7] * len(one.drafts)
        assert one.drafts == two.drafts
        for values, others in zip(one.draft_confidences, two.draft_confidences, strict=True):
            assert values == pytest.approx(others, abs=1e-12)
    for one, two in zip(alone, narrow.generate(prompts, params), strict=True):
        known = {step.start: step for step in one.drafts}
        for step in two.drafts:
            assert len(step.confidences) == len(step.draft_ids)
            if step.start in known and known[step.start].draft_ids[: len(step.draft_ids)] == step.draft_ids:
                assert step.confidences == pytest.approx(known[step.start].confidences[: len(step.draft_ids)])


def test_a_confidence_that_is_not_a_number_is_none() -> None:
    draft = draft_model("dspark")
    assert isinstance(draft, DSparkDraft)
    assert draft._confidence is not None
    draft._confidence.bias.fill_(torch.nan)
    (output,) = bundled_llm(draft, 7).generate([PROMPT], PARAMS)
    (plain,) = bundled_llm(None, 0).generate([PROMPT], PARAMS)
    assert output.token_ids == plain.token_ids
    assert {value for values in output.draft_confidences for value in values} == {None}
    assert find_confidence([output], 7) is None


def test_a_stored_confidence_head_keeps_float32_in_a_bfloat16_run() -> None:
    source, case = open_draft(walking_folder("dspark")).source, KINDS["dspark"]
    assert isinstance(case, Spark)
    weights = load_draft_weights(source, placement(torch.bfloat16))
    stored = confidence_tensors(case, source.config.hidden_size)
    assert torch.equal(weights["confidence_head.proj.weight"], stored["proj.weight"])
    assert weights["markov_head.markov_w1.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_filters_of_a_request_do_not_apply_to_its_drafts(kind: str) -> None:
    """Where two requests have the same first token, top-k changes no drafted token, and the target still uses it."""
    llm = bundled_llm(draft_model(kind), 7, draft_sampling="probabilistic", max_num_requests=16)
    prompts = [PROMPT] * 16
    whole, cut = (
        llm.generate(
            prompts,
            [replace(PARAMS, max_new_tokens=4, temperature=1.3, seed=seed, top_k=top_k) for seed in range(16)],
        )
        for top_k in (0, 2)
    )
    same = [(one, two) for one, two in zip(whole, cut, strict=True) if one.token_ids[0] == two.token_ids[0]]
    assert len(same) > 3
    assert all(one.drafts[0].draft_ids == two.drafts[0].draft_ids for one, two in same)
    assert [one.token_ids for one in whole] != [two.token_ids for two in cut]


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_has_the_rows_of_its_layout(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For K tokens a fill-in draft runs K + 1 rows and an anchor-first draft K. The target verifies K + 1 rows."""
    draft = draft_model(kind)
    assert isinstance(draft, DFlashDraft)
    rows: list[int] = []
    embed = draft._embed

    def watched(block_ids: torch.Tensor) -> torch.Tensor:
        rows.append(block_ids.numel())
        return embed(block_ids)

    monkeypatch.setattr(draft, "_embed", watched)
    llm = bundled_llm(draft, 5)
    llm.generate([PROMPT], PARAMS)
    assert set(rows) == {5 if kind == "anchor-first" else 6}
    assert llm.limits.num_lookahead_tokens == 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_inside_a_block_cuts_the_text(kind: str) -> None:
    """Every token of a text as a stop token, in one batch, also where it is an accepted draft token."""
    draft = draft_model(kind, torch.float64)
    plain = bundled_llm(None, 0, dtype=torch.float64).generate([PROMPT], PARAMS)[0].token_ids
    params = [SamplingParams(max_new_tokens=NUM_TOKENS, stop_token_ids=(token,)) for token in plain[:10]]
    outputs = bundled_llm(draft, 7, dtype=torch.float64, max_num_requests=8).generate([PROMPT] * len(params), params)
    assert [output.token_ids for output in outputs] == [plain[: plain.index(token) + 1] for token in plain[:10]]
    assert any(output.committed_lengths[-1] < output.acceptance_lengths[-1] for output in outputs if output.drafts)


@pytest.mark.parametrize("kind", KINDS)
def test_more_tokens_than_a_trained_block_predicts_are_refused(kind: str) -> None:
    """A fill-in block of 8 rows predicts 7 tokens, and an anchor-first block 8."""
    config, trained = draft_model(kind).config, 8 if kind == "anchor-first" else 7
    assert resolve_num_drafts(EngineConfig(), config) == trained
    with refuses(UsageError, "too-many-draft-tokens", field="num_draft_tokens", found=trained + 1) as refused:
        resolve_num_drafts(EngineConfig(num_draft_tokens=trained + 1), config)
    assert "blocks of 8" in str(refused.value)


@pytest.mark.parametrize("kind", PREDICTING)
def test_a_confidence_reads_the_targets_id_of_the_token_before(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token follows the anchor. A reduced vocabulary has other ids than the target."""
    draft = draft_model(kind)
    assert isinstance(draft, DSparkDraft)
    read: list[list[int]] = []
    predict = draft._confidence

    def watched(hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        assert predict is not None
        read.append(tokens[0].tolist())
        return predict(hidden, tokens)

    monkeypatch.setattr(draft, "_confidence", watched)
    (output,) = bundled_llm(draft, 7).generate([PROMPT], PARAMS)
    text = PROMPT + output.token_ids
    wanted = [[text[len(PROMPT) + step.start - 1], *step.draft_ids[:-1]] for step in output.drafts]
    assert read[: len(wanted)] == wanted


def test_a_narrow_request_has_the_confidences_of_its_own_tokens() -> None:
    """Its batch mate verifies the whole block."""
    prompts, widths = [PROMPT, bundled_prompts()[1][:20]], (3, None)
    params = [replace(PARAMS, verify_width=width) for width in widths]
    narrow, wide = bundled_llm(draft_model("dspark"), 7, max_num_requests=2).generate(prompts, params)
    assert {len(values) for values in narrow.draft_confidences} == {2}
    assert {len(values) for values in wide.draft_confidences} == {7}
