"""The fit of a draft and a target: every misfit is found by its field, also in a config that cannot be read."""

import re
from dataclasses import replace
from typing import Any

import pytest

from dflash_cli.checkpoints.opening import open_target
from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
from dflash_runtime.checkpoint.pair import TargetExpectations, check_pair, find_misfits
from dflash_runtime.errors import PairMismatch
from dflash_testing.pairs import bundled_draft
from dflash_testing.refusals import refuses

SOURCE = open_target(fetch_directory(TINY, Role.TARGET))
DRAFT, TARGET = TargetExpectations.of(bundled_draft().config), SOURCE.config


def test_a_pair_that_fits() -> None:
    assert list(find_misfits(DRAFT, TARGET)) == []


@pytest.mark.parametrize(
    ("field", "value", "found", "expected"),
    [
        ("hidden_size", 100, "100", TARGET.hidden_size),
        ("target_hidden_size", 100, "100", TARGET.hidden_size),
        ("vocab_size", 7, "7", TARGET.vocab_size),
        ("vocab_size", "7", "'7'", TARGET.vocab_size),
        ("mask_token_id", 10**6, "1000000", TARGET.vocab_size),
        ("target_layer_ids", (0, 99), "99", TARGET.num_layers - 1),
        ("num_target_layers", 99, "99", TARGET.num_layers),
    ],
)
def test_each_misfit_names_its_field_and_both_values(field: str, value: Any, found: str, expected: int) -> None:
    (misfit,) = find_misfits(replace(DRAFT, **{field: value}), TARGET)
    assert misfit.field == field
    assert found in misfit.found.split()
    assert str(expected) in re.findall(r"\d+", misfit.target)


@pytest.mark.parametrize("field", ["hidden_size", "target_hidden_size", "mask_token_id", "num_target_layers"])
def test_a_missing_statement_is_not_a_misfit(field: str) -> None:
    missing: dict[str, Any] = {field: None}
    assert list(find_misfits(replace(DRAFT, **missing), TARGET)) == []


def test_all_misfits_are_named_at_once() -> None:
    draft = bundled_draft().source
    wrong = replace(draft, config=replace(draft.config, mask_token_id=3, num_target_layers=99, vocab_size=3000))
    with refuses(PairMismatch, field="vocab_size", found=("vocab_size", "num_target_layers")) as caught:
        check_pair(wrong, SOURCE)
    assert all(text in caught.value.message for text in ("vocab_size 3000", "num_target_layers 99"))
