"""An evaluation read back from its document equals the original. Other files are refused with path and field."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_cli.acceptance.acceptance_report import Evaluation, legend
from dflash_cli.acceptance.condition_results import ConditionResult
from dflash_cli.acceptance.conversation_counts import ConversationCounts
from dflash_cli.acceptance.exact_match import ExactMatch, PlainMatch
from dflash_cli.acceptance.intervals.proportions import paired_share_interval, wilson_interval
from dflash_cli.acceptance.intervals.statistics import Anchors, Interval, summarise
from dflash_cli.comparing.stored_evaluation import read_evaluations, refuse_capped
from dflash_cli.generation.conditions import Condition
from dflash_cli.publishing.csv_report import to_csv
from dflash_cli.publishing.exports.export_format import ExportPlan, Thinking
from dflash_cli.publishing.exports.golden_al import GoldenLength
from dflash_cli.publishing.markdown_report import evaluation_to_markdown
from dflash_runtime.documents import to_json
from dflash_runtime.errors import CheckpointNotFound, UnsupportedError, UsageError
from dflash_testing.evaluations import drawn_evaluation, request_output, write_evaluation
from dflash_testing.refusals import refuses


def conditions(evaluation: Evaluation) -> tuple[ConditionResult, ...]:
    first, second = list(evaluation.categories.values())[:2]
    return (
        ConditionResult(condition=Condition(thinking="on"), summary=first, num_failed=0, prompt_len=10.5),
        ConditionResult(
            condition=Condition(thinking="off"), summary=second, num_failed=1, prompt_len=9.0, num_pairs=12,
            difference=-0.2, difference_interval=Interval(-0.3, -0.1, 0.95),
        ),
    )  # fmt: skip


def test_a_golden_length_comes_from_the_condition_with_the_requested_thinking(tmp_path: Path) -> None:
    evaluation = drawn_evaluation()
    evaluation = replace(evaluation, conditions=conditions(evaluation))
    (stored,) = read_evaluations([write_evaluation(tmp_path / "asked.json", evaluation)])
    modes: tuple[Thinking, ...] = ("on", "off")
    for thinking, item in zip(modes, evaluation.conditions, strict=True):
        exported = GoldenLength().export(ExportPlan(stored=stored, thinking=thinking, model="m"))
        (length,) = yaml.safe_load(exported.text)["m"][f"thinking_{thinking}"].values()
        assert length == round(item.summary.counts.acceptance_len or 0, 2)


def test_a_document_comes_back_as_it_was(tmp_path: Path) -> None:
    evaluation = drawn_evaluation()
    (stored,) = read_evaluations([write_evaluation(tmp_path / "drawn.json", evaluation)])
    assert stored.name == "drawn"
    assert stored.evaluation == evaluation
    assert evaluation_to_markdown(stored.evaluation) == evaluation_to_markdown(evaluation)


def test_the_mean_over_anchors_of_a_replay_comes_back(tmp_path: Path) -> None:
    anchors = summarise([request_output([1, 3, 5, 2, 2], index) for index in range(12)], 4, num_resamples=200)
    evaluation = replace(drawn_evaluation(mode="replay"), anchors=Anchors.of(anchors))
    (stored,) = read_evaluations([write_evaluation(tmp_path / "replayed.json", evaluation)])
    assert stored.evaluation == evaluation
    assert legend(stored.evaluation) == legend(evaluation)
    assert "60 anchors" in "\n".join(legend(evaluation))
    assert "2.600" in "\n".join(legend(evaluation))


def test_conditions_and_exact_matches_come_back(tmp_path: Path) -> None:
    evaluation = drawn_evaluation()
    counts = {"num_pairs": 9, "num_correct": 6, "num_only_draft": 1, "num_only_plain": 2, "num_same_text": 7}
    interval = wilson_interval(5, 9, 0.95)
    plain = PlainMatch(**counts, interval=interval, difference_interval=paired_share_interval(4, 2, 1, 9, 0.95))
    evaluation = replace(
        evaluation,
        conditions=conditions(evaluation),
        exact_match=(
            ExactMatch(condition="thinking on", num_scored=9, num_correct=5, num_cut=1, interval=interval, plain=plain),
        ),
    )
    (stored,) = read_evaluations([write_evaluation(tmp_path / "asked.json", evaluation)])
    assert stored.evaluation == evaluation
    assert evaluation_to_markdown(stored.evaluation) == evaluation_to_markdown(evaluation)
    assert "-0.20 [-0.30, -0.10]" in evaluation_to_markdown(stored.evaluation)
    rows = list(csv.DictReader(io.StringIO(to_csv([stored]))))
    assert {row["condition"] for row in rows} == {"", "thinking on", "thinking off"}


def test_a_document_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    document = to_json(drawn_evaluation())
    for name in ("rejected_tokens", "metrics", "per_pos_conditional_intervals"):
        del document[name]
    for part in (document, *document["categories"].values()):
        part.pop("per_pos_conditional_intervals", None)
    path = tmp_path / "old.json"
    path.write_text(json.dumps(document))
    (stored,) = read_evaluations([path])
    assert stored.evaluation.rejected_tokens == ()
    assert set(stored.evaluation.total.per_pos_conditional_intervals) == {None}


OTHER_FILES: dict[str, tuple[Any, str | None, str | None]] = {
    "a list": ([], None, None),
    "another kind": ({"kind": "generate"}, "missing-key", "schema_version"),
    "another kind of ours": ({"schema_version": 1, "kind": "generate"}, "wrong-value", "kind"),
    "no more than the kind": ({"schema_version": 1, "kind": "eval-acceptance"}, "missing-key", "num_drafts"),
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_another_file_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    content, id, field = OTHER_FILES[name]
    path.write_text(json.dumps(content))
    with refuses(UsageError, id, path=path, field=field) as caught:
        read_evaluations([path])
    assert "\n" not in caught.value.message


CONVERSATION = to_json(ConversationCounts(digest="a", name="b", num_tokens=1, num_steps=1))
CHANGED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a text for a number": ({"num_drafts": "7"}, "wrong-value", "num_drafts"),
    "true for a number": ({"num_tokens": True}, "wrong-value", "num_tokens"),
    "fewer positions": ({"per_pos_verified": [1]}, "wrong-value", "per_pos_verified"),
    "an unknown key": ({"acceptance_length": 3.0}, "unknown-key", "acceptance_length"),
    "an unknown fact": ({"prompts": {"name": "a", "num_available": 1, "size": 2}}, "unknown-key", "prompts.size"),
    "half an interval": ({"acceptance_len_interval": {"low": 1.0}}, "missing-key", "acceptance_len_interval.high"),
    "a category without steps": ({"categories": {"a": {}}}, "missing-key", "categories.a.num_drafts"),
    "steps below 0": (
        {"conversations": [CONVERSATION | {"num_steps": -1}]},
        "wrong-value",
        "conversations[0].num_steps",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_malformed_document_is_refused_with_the_field(name: str, tmp_path: Path) -> None:
    changes, id, field = CHANGED[name]
    path = write_evaluation(tmp_path / "result.json", drawn_evaluation(), **changes)
    with refuses(UsageError, id, path=path, field=field):
        read_evaluations([path])


@pytest.mark.parametrize("text", ['{"seconds": NaN}', '{"kind": "a", "kind": "b"}', '{"a":' * 100_000, "{", "\ufeff{}"])
def test_text_that_is_not_strict_json_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with refuses(UsageError, path=path):
        read_evaluations([path])


def test_a_document_of_a_later_release_is_unsupported(tmp_path: Path) -> None:
    path = write_evaluation(tmp_path / "result.json", drawn_evaluation(), schema_version=2, new_key=1)
    with refuses(UnsupportedError, "later-version", field="schema_version", found=2, path=path):
        read_evaluations([path])


def test_a_result_without_draft_steps_is_refused(tmp_path: Path) -> None:
    empty: dict[str, Any] = {
        "num_drafts": 0, "num_accepted_tokens": 0, "histogram": [0] * 5, "per_pos_accepted": [0] * 4,
        "per_pos_verified": [0] * 4,
    }  # fmt: skip
    path = write_evaluation(tmp_path / "plain.json", drawn_evaluation(), **empty)
    with refuses(UsageError, "no-steps", path=path):
        read_evaluations([path])
    with refuses(CheckpointNotFound, "file-not-found", path=tmp_path / "absent.json"):
        read_evaluations([tmp_path / "absent.json"])


def test_a_result_with_unverified_positions_is_refused(tmp_path: Path) -> None:
    evaluation = drawn_evaluation()
    verified = [evaluation.total.counts.num_drafts] * 3 + [0]
    (stored,) = read_evaluations([write_evaluation(tmp_path / "c.json", evaluation, per_pos_verified=verified)])
    with refuses(UsageError, "capped-result", path=tmp_path / "c.json", found=3.0, expected="4"):
        refuse_capped(stored)


def test_the_legend_says_how_much_lies_past_the_ends_of_answers() -> None:
    """Whole blocks are counted. With short answers, most of their tokens are not part of an answer."""
    evaluation = drawn_evaluation()
    definitions = {**evaluation.total.definitions, "committed": 1.0}
    short = replace(evaluation, total=replace(evaluation.total, definitions=definitions))
    assert len(legend(short)) == len(legend(evaluation)) + 1
    assert "1.000 tokens per step" in "\n".join(legend(short))
