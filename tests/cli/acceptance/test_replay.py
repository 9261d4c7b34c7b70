"""Replay: a draft has the same steps on a dump as in a live run."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.acceptance.replay import replay
from dflash_cli.checkpoints.references import TINY
from dflash_cli.generation.loaded_pair import open_session
from dflash_cli.generation.prompts import PromptRow
from dflash_runtime.documents import to_json
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.dumps import EXACT, TAPS, bundled_rows, draft_of, dump_to, replayed, request_for, rows_of
from dflash_testing.paths import GOLDEN


def live(name: str, rows: Sequence[PromptRow], params: SamplingParams, **engine: Any) -> list[RequestOutput]:
    session = open_session(name, TINY, replace(EXACT, **engine))
    answers = [item.answer for item in session.answer(rows, params) if item.answer is not None]
    return [item.output for item in sorted(answers, key=lambda item: item.row.index)]


SAMPLED = {"temperature": 0.8, "top_k": 40, "seed": 3}


@pytest.mark.parametrize("sampling", [pytest.param({}, marks=pytest.mark.slow), SAMPLED], ids=["greedy", "sampled"])
def test_the_walk_has_the_steps_of_a_live_run(sampling: dict[str, Any], tmp_path: Path) -> None:
    """Equal draft tokens, accepted and committed tokens, also after stop tokens and at the end of an answer."""
    rows = bundled_rows(3)
    session = open_session(None, TINY, replace(EXACT, num_draft_tokens=0))
    params = SamplingParams(max_new_tokens=24, **sampling).with_stops(session.stop_token_ids)
    dump = dump_to(tmp_path / "dump", rows, params)
    for name in (TINY, "tiny:reduced"):
        outputs = live(name, rows, params)
        found = [item.output(item.walked) for item in replayed(request_for(dump, name))]
        assert sum(len(output.drafts) for output in outputs) > 20
        for one, other in zip(found, outputs, strict=True):
            assert one.token_ids == other.token_ids
            assert one.drafts == other.drafts
            assert one.acceptance_lengths == other.acceptance_lengths
            assert one.committed_lengths == other.committed_lengths
            assert one.finish_reason == other.finish_reason


def test_the_walks_of_trees_have_the_lengths_of_live_runs(tmp_path: Path) -> None:
    """One forward per anchor serves trees of all sizes."""
    rows, params = bundled_rows(2), SamplingParams(max_new_tokens=24)
    dump = dump_to(tmp_path / "dump", rows, params)
    request = replace(request_for(dump, "tiny:reduced"), trees=(4, 24))
    found = replayed(request)
    for index, num_nodes in enumerate(request.trees):
        outputs = live("tiny:reduced", rows, params, num_tree_nodes=num_nodes)
        for item, output in zip(found, outputs, strict=True):
            walked = item.output(item.trees[index])
            assert walked.acceptance_lengths == output.acceptance_lengths
            assert walked.committed_lengths == output.committed_lengths
    evaluation = replay(request)
    assert [(item.num_nodes, item.summary.counts.num_drafts) for item in evaluation.trees] == [
        (num_nodes, sum(len(item.trees[index]) for item in found)) for index, num_nodes in enumerate((4, 24))
    ]
    length, block = evaluation.trees[1].summary.counts.acceptance_len, evaluation.total.counts.acceptance_len
    assert length is not None
    assert block is not None
    assert evaluation.trees[1].gain == length / block - 1 > 0


def test_all_anchors_at_once_have_the_same_steps_as_one_anchor_at_a_time(tmp_path: Path) -> None:
    """The walk drafts one anchor per text at a time, the mean drafts all. Both have equal steps at equal anchors."""
    dump = dump_to(tmp_path / "dump", bundled_rows(2), SamplingParams(max_new_tokens=24))
    every, alone = replayed(request_for(dump)), replayed(request_for(dump, every=0))
    for one, other in zip(every, alone, strict=True):
        by_start = {step.start: step for step in one.sampled}
        assert other.sampled == ()
        assert len(one.sampled) == 23
        assert one.walked == other.walked == tuple(by_start[step.start] for step in other.walked)
    third = replayed(request_for(dump, every=3))
    assert [item.sampled for item in third] == [item.sampled[::3] for item in every]
    assert [item.walked for item in third] == [item.walked for item in every]


RECORDED = json.loads((GOLDEN / "zlab_traces.json").read_text())


def test_the_walk_has_the_steps_of_the_reference_loop(tmp_path: Path) -> None:
    """Equal to z-lab's recorded traces, with full and sliding attention. Their loop shortens blocks near the end."""
    length = RECORDED["provenance"]["max_new_tokens"]
    traces = {reading: [item for item in RECORDED["traces"] if item["reading"] == reading][:2]
              for reading in ("full", "sliding causal")}  # fmt: skip
    config = replace(EXACT, dtype="float32")
    prompts = [trace["prompt_token_ids"] for trace in traces["full"]]
    dump = dump_to(tmp_path / "dump", rows_of(prompts), SamplingParams(max_new_tokens=length), config, num_overhang=0)
    for reading, items in traces.items():
        window = RECORDED["provenance"]["window"] if "sliding" in reading else None
        base = draft_of(TINY).config
        draft = draft_of(TINY, causal=("causal" in reading,) * base.num_layers, windows=(window,) * base.num_layers)
        for item, trace in zip(replayed(request_for(dump, config=config, draft=draft)), items, strict=True):
            assert list(item.output(()).token_ids) == trace["token_ids"]
            walked = [step.num_accepted + 1 for step in item.walked]
            assert len(walked) > 5
            assert walked == trace["acceptance_lengths"][: len(walked)]


def test_a_block_beyond_the_known_tokens_is_not_judged(tmp_path: Path) -> None:
    rows, params = bundled_rows(2), SamplingParams(max_new_tokens=24)
    whole = replayed(request_for(dump_to(tmp_path / "whole", rows, params)))
    cut = replayed(request_for(dump_to(tmp_path / "cut", rows, params, num_overhang=0)))
    for one, other in zip(cut, whole, strict=True):
        assert len(one.sampled) == 24 - 7
        assert one.sampled == other.sampled[: 24 - 7]
        assert one.walked == tuple(step for step in other.walked if step.start <= 24 - 7)


def test_blocks_past_the_drafts_positions_are_not_judged(tmp_path: Path) -> None:
    dump = dump_to(tmp_path / "dump", bundled_rows(2), SamplingParams(max_new_tokens=24))
    text = min(dump.texts, key=lambda item: item.prompt_len)
    draft = draft_of(TINY, max_position_embeddings=text.prompt_len + 10)
    found, whole = replayed(request_for(dump, draft=draft)), replayed(request_for(dump))
    assert sum(len(item.sampled) for item in found) == 3
    for one, other in zip(found, whole, strict=True):
        assert one.sampled == other.sampled[: len(one.sampled)]


def test_an_evaluation_has_the_mean_over_anchors_beside_the_walk(tmp_path: Path) -> None:
    dump = dump_to(tmp_path / "dump", bundled_rows(4), SamplingParams(max_new_tokens=12))
    evaluation = replay(request_for(dump))
    assert evaluation.anchors is not None
    assert evaluation.anchors.num_anchors == 4 * 11
    document = to_json(evaluation)
    assert document["anchors"]["mean_over_anchors"] != document["acceptance_len"]
    assert document["settings"]["mode"] == "replay"
    assert document["settings"]["max_new_tokens"] == 12
    assert document["measured"]["dump"]["taps"] == list(TAPS)
    assert document["measured"]["num_blocks"] == 4 * 11
    alone = to_json(replay(request_for(dump, every=0)))
    assert alone["anchors"] is None
    assert alone["measured"]["num_blocks"] == alone["num_drafts"] == document["num_drafts"]
