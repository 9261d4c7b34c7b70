"""The figure that a file states for `--expected`: a model card, a profile, or a result."""

import json
from pathlib import Path

import pytest

from dflash_cli.comparing.stated_figure import read_stated_figure
from dflash_cli.diagnosis.run_settings import read_expected
from dflash_runtime.errors import CheckpointNotFound, UsageError
from dflash_testing.refusals import refuses

CARD = """---
model-index:
- name: draft
  results:
  - task: {{type: text-generation}}
    dataset: {{type: prompts, name: prompts.jsonl}}
    metrics:
    - {{type: {metric}, value: 3.439}}
---
# A draft
"""


def test_a_card_and_a_profile_state_a_figure(tmp_path: Path) -> None:
    card, profile = tmp_path / "README.md", tmp_path / "profile.json"
    card.write_text(CARD.format(metric="acceptance_length"))
    profile.write_text(json.dumps({"mean_accept_length": 3.2, "measured": True}))
    assert (read_stated_figure(card), read_stated_figure(profile)) == (3.439, 3.2)
    assert (read_expected(str(card)).value, read_expected("4.2").value) == (3.439, 4.2)


def test_a_file_without_a_figure_is_refused(tmp_path: Path) -> None:
    card, other = tmp_path / "README.md", tmp_path / "other.json"
    card.write_text(CARD.format(metric="accuracy"))
    other.write_text("{}")
    with refuses(UsageError, "no-stated-figure"):
        read_stated_figure(card)
    with refuses(UsageError, "unknown-result-format"):
        read_stated_figure(other)
    with pytest.raises(CheckpointNotFound):
        read_stated_figure(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("head", "id"),
    [
        ("a: " + "[" * 3000, "yaml-too-large"),
        ("a: \0", "invalid-yaml"),
        ("- a", "not-a-mapping"),
        ("model-index: 5", "no-stated-figure"),
        ("model-index: [5]", "no-stated-figure"),
        ("model-index: [{results: 5}]", "no-stated-figure"),
        ("model-index: [{results: [{metrics: {a: 1}}]}]", "no-stated-figure"),
        ("model-index: [{results: [{metrics: [{type: acceptance_length, value: .nan}]}]}]", "no-stated-figure"),
        ("model-index: [{results: [{metrics: [{type: acceptance_length, value: 'x'}]}]}]", "no-stated-figure"),
    ],
)
def test_a_malformed_card_is_refused(head: str, id: str, tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text(f"---\n{head}\n---\n")
    with refuses(UsageError, id):
        read_stated_figure(card)


def test_a_card_without_an_end_of_its_metadata_is_refused(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text("---\na: 1\n")
    with refuses(UsageError, "card-metadata-open"):
        read_stated_figure(card)


@pytest.mark.parametrize("given", ["1", "0.5", "nan", "inf", "-3"])
def test_a_figure_that_no_draft_can_have_is_refused(given: str) -> None:
    with refuses(UsageError, "expected-out-of-range", field="--expected"):
        read_expected(given)
