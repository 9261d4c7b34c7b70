"""The most often rejected tokens: counts by hand, and equal counts from a run and from its resumed file."""

import json
from pathlib import Path

import pytest

from dflash_cli.acceptance.rejected_tokens import MOST, find_rejected
from dflash_runtime.scheduling.request import DraftStep, FinishReason
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_testing.command_line import run_main


def output(*steps: tuple[list[int], list[int]]) -> RequestOutput:
    """A request with steps of (drafted, committed). Committed are the accepted tokens, then the target's own token."""
    token_ids, made = [1], []
    for drafted, committed in steps:
        accepted = next(
            (place for place, pair in enumerate(zip(drafted, committed, strict=False)) if len({*pair}) > 1), None
        )
        num_accepted = len(committed) - 1 if accepted is None else accepted
        made.append(DraftStep(len(token_ids), tuple(drafted), num_accepted, len(committed)))
        token_ids += committed
    return RequestOutput(
        index=0,
        prompt_token_ids=(1,),
        token_ids=tuple(token_ids),
        finish_reason=FinishReason.STOP,
        acceptance_lengths=tuple(step.num_accepted + 1 for step in made),
        committed_lengths=tuple(step.num_committed for step in made),
        rejected_ids=tuple(step.rejected_id for step in made),
    )


def test_counts_by_hand() -> None:
    """7 is rejected twice, for 8 and 9, and accepted once. Tokens drafted after a rejected token are not judged, and
    neither is the target's own token, such as 7 in the last step."""
    first, second = output(([5, 7, 7], [5, 8]), ([7, 5, 6], [9])), output(([7, 6, 5], [7, 6, 4]), ([6, 1, 1], [7]))
    found = find_rejected([first, second], None)
    counts = [(item.token_id, item.num_rejected, item.num_judged) for item in found]
    assert counts == [(7, 2, 3), (5, 1, 2), (6, 1, 2)]
    assert [(item.token_id, item.count) for item in found[0].replacements] == [(8, 1), (9, 1)]
    assert found[0].rate == 2 / 3
    assert found[0].text == "7"


def test_a_block_that_is_accepted_completely_or_cut_has_no_rejected_token() -> None:
    assert find_rejected([output(([5, 6], [5, 6, 7]))], None) == ()
    cut = DraftStep(start=1, draft_ids=(5, 6, 7), num_accepted=2, num_committed=2)
    assert cut.rejected_id is None


def test_many_tokens_are_cut_to_the_most_frequent() -> None:
    found = find_rejected([output(*(([token], [1000]) for token in range(2, 60))), output(([59], [1000]))], None)
    assert len(found) == MOST
    assert (found[0].token_id, found[1].token_id) == (59, 2)


def test_a_resumed_run_has_the_same_rejected_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = ["eval-acceptance", "tiny", "--num-prompts", "4", "-n", "16", "--output", "rows.jsonl", "--json"]
    first, again = (json.loads(run_main(*run, *more).out) for more in ((), ("--resume",)))
    assert first["rejected_tokens"] == again["rejected_tokens"]
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()[1:]]
    refused = [token for row in rows for token in row["rejected_ids"] if token is not None]
    assert refused
    for item in first["rejected_tokens"]:
        assert refused.count(item["token_id"]) == item["num_rejected"] <= item["num_judged"]
    steps = [row["metrics"]["speculative_decoding"] for row in rows]
    assert [[length - 1 for length in row["acceptance_lengths"]] for row in rows] == [
        item["per_step_accepted"] for item in steps
    ]
    pooled = first["metrics"]["speculative_decoding"]
    assert pooled["acceptance_histogram"] == first["histogram"]
    assert pooled["num_spec_steps"] == sum(item["num_spec_steps"] for item in steps) == first["num_drafts"]
    assert pooled["mean_acceptance_length"] == first["acceptance_len"]
