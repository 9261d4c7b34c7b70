"""Differences of fingerprints, as errors name them."""

import pytest

from dflash_runtime.errors import MISSING
from dflash_runtime.kv_transfer.fingerprint import NO_DRAFT, Fingerprint
from dflash_runtime.kv_transfer.handoff import concerns_target
from dflash_runtime.notices import Notice

PLAIN = Fingerprint({"dtype": "float32", "draft": NO_DRAFT})
DRAFTED = Fingerprint({"dtype": "float32", "draft": "dflash", "block_size": 8, "taps": [1, 3]})


def test_each_field_that_differs_is_named_with_both_values() -> None:
    other = {"dtype": "bfloat16", "draft": "dflash", "block_size": 8, "rounding": "fp8"}
    assert DRAFTED.differences(other) == {
        "dtype": ("float32", "bfloat16"), "taps": ([1, 3], MISSING), "rounding": (MISSING, "fp8"),
    }  # fmt: skip
    assert [(notice.id, notice.field) for notice in DRAFTED.notices(other)] == [
        ("fingerprint-differs", name) for name in ("dtype", "taps", "rounding")
    ]
    assert DRAFTED.differences(DRAFTED.fields) == {}


@pytest.mark.parametrize(("here", "there"), [(PLAIN, DRAFTED), (DRAFTED, PLAIN)])
def test_a_missing_draft_is_one_difference(here: Fingerprint, there: Fingerprint) -> None:
    assert here.differences(there.fields) == {"draft": (here.fields["draft"], there.fields["draft"])}


def test_a_digest_does_not_depend_on_the_order_of_fields() -> None:
    again = Fingerprint(dict(reversed(list(DRAFTED.fields.items()))))
    assert again.digest == DRAFTED.digest != PLAIN.digest
    assert len(DRAFTED.digest) == 32


@pytest.mark.parametrize(
    ("field", "concerns"),
    [
        ("target", True),
        ("state.0.conv", True),
        ("target weights", True),
        ("target_layer_ids", False),
        ("draft", False),
        ("draft weights", False),
        (None, False),
    ],
)
def test_problems_of_the_target_are_known_by_their_field(field: str | None, concerns: bool) -> None:
    assert concerns_target(Notice("a target problem", id="shape-differs", field=field)) == concerns
