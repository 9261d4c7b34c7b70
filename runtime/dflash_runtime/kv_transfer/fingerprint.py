"""The fingerprint of a pair: everything that two engines must share so that one can use the KV of the other."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_runtime.checkpoint.stored.digests import digest_value
from dflash_runtime.errors import MISSING
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import shorten

NO_DRAFT = "none"
"""The value of the field `draft` of a pair without a draft."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Fields by name: weights of both models, layers, taps, K, rope, windows, causality, dtype, page size, layout.

    Values are plain JSON values and not one hash, so that an error can name the fields that differ.
    """

    fields: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """A digest of all fields: 16 bytes in hexadecimal, the same in every process."""
        return digest_value(dict(self.fields), digest_size=16)

    def differences(self, other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """The fields that differ, by name: the value here, and the value in the fields of another fingerprint.

        The value of an absent field is MISSING. If one side lacks a draft, the other side's fields about the draft are
        left out.
        """
        names = [*self.fields, *(name for name in other if name not in self.fields)]
        for one, two in ((self.fields, other), (other, self.fields)):
            if one.get("draft") == NO_DRAFT != two.get("draft"):
                names = [name for name in names if name in one]
        pairs = {name: (self.fields.get(name, MISSING), other.get(name, MISSING)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def notices(self, other: Mapping[str, Any]) -> list[Notice]:
        """A text for each field that differs: `dtype: here float32, there bfloat16`."""
        return [
            Notice(f"{name}: here {_shown(here)}, there {_shown(there)}", id="fingerprint-differs", field=name)
            for name, (here, there) in self.differences(other).items()
        ]


def _shown(value: Any) -> str:
    text = "nothing" if value is MISSING else value if isinstance(value, str) else json.dumps(value)
    return shorten(text, 48)
