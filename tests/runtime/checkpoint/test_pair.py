"""Whether a draft fits a target: every misfit is found, by field, also where a config is too broken to be read."""

from dataclasses import replace
from typing import Any

import pytest

from dflash_cli.checkpoints.opening import open_target
from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
from dflash_runtime.checkpoint.pair import TargetExpectations, check_pair, find_misfits
from dflash_runtime.errors import PairMismatch
from dflash_testing.pairs import bundled_draft

SOURCE = open_target(fetch_directory(TINY, Role.TARGET))
DRAFT, TARGET = TargetExpectations.of(bundled_draft().config), SOURCE.config


def test_a_pair_that_fits() -> None:
    assert list(find_misfits(DRAFT, TARGET)) == []


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("hidden_size", 100, f"hidden_size 100, the target's is {TARGET.hidden_size}"),
        ("target_hidden_size", 100, f"target_hidden_size 100, the target's hidden_size is {TARGET.hidden_size}"),
        ("vocab_size", 7, f"vocab_size 7, the target's is {TARGET.vocab_size}"),
        ("vocab_size", "7", f"vocab_size '7', the target's is {TARGET.vocab_size}"),
        ("mask_token_id", 10**6, "mask_token_id 1000000, which is outside the target's"),
        ("target_layer_ids", (0, 99), "target_layer_ids names layer 99 (counted from 0), the target has layers 0.."),
        ("num_target_layers", 99, f"num_target_layers 99, the target has {TARGET.num_layers} layers"),
    ],
)
def test_each_misfit_names_its_field(field: str, value: Any, text: str) -> None:
    (misfit,) = find_misfits(replace(DRAFT, **{field: value}), TARGET)
    assert misfit.field == field
    assert str(misfit).startswith(text)


@pytest.mark.parametrize("field", ["hidden_size", "target_hidden_size", "mask_token_id", "num_target_layers"])
def test_what_is_not_stated_fits(field: str) -> None:
    missing: dict[str, Any] = {field: None}
    assert list(find_misfits(replace(DRAFT, **missing), TARGET)) == []


def test_all_are_named_at_once() -> None:
    draft = bundled_draft().source
    wrong = replace(draft, config=replace(draft.config, mask_token_id=3, num_target_layers=99, vocab_size=3000))
    with pytest.raises(PairMismatch, match=r"vocab_size 3000, .*; num_target_layers 99, "):
        check_pair(wrong, SOURCE)
