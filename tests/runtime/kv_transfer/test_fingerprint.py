"""Differences of fingerprints, as errors name them."""

import pytest

from dflash_runtime.errors import InvalidHandoff
from dflash_runtime.kv_transfer.fingerprint import NO_DRAFT, Fingerprint
from dflash_testing.refusals import refuses

PLAIN = Fingerprint({"dtype": "float32", "draft": NO_DRAFT})
DRAFTED = Fingerprint({"dtype": "float32", "draft": "dflash", "block_size": 8, "taps": [1, 3]})


def test_each_field_that_differs_is_named_with_both_values() -> None:
    other = Fingerprint({"dtype": "bfloat16", "draft": "dflash", "block_size": 8, "rounding": "fp8"})
    assert DRAFTED.differences(other) == [
        "dtype: here float32, there bfloat16",
        "taps: here [1, 3], there nothing",
        "rounding: here nothing, there fp8",
    ]
    assert DRAFTED.differences(DRAFTED) == []


@pytest.mark.parametrize(("here", "there"), [(PLAIN, DRAFTED), (DRAFTED, PLAIN)])
def test_a_missing_draft_is_one_difference(here: Fingerprint, there: Fingerprint) -> None:
    assert here.differences(there) == [f"draft: here {here.fields['draft']}, there {there.fields['draft']}"]


def test_a_digest_does_not_depend_on_the_order_of_fields() -> None:
    again = Fingerprint(dict(reversed(list(DRAFTED.fields.items()))))
    assert again.digest == DRAFTED.digest != PLAIN.digest
    assert len(DRAFTED.digest) == 32


def test_a_header_without_an_object_is_refused() -> None:
    with refuses(InvalidHandoff, field="fingerprint", found=[1]):
        Fingerprint.read([1])
