"""The fingerprint of a pair: everything that two engines must share so that one can use the KV of the other."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_runtime.checkpoint.digests import digest_value
from dflash_runtime.errors import InvalidHandoff
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

    def differences(self, other: "Fingerprint") -> list[str]:
        """One text for each field that differs: `name: here <value of self>, there <value of other>`.

        If one side has no draft, the other side's fields about the draft are left out.
        """
        names = [*self.fields, *(name for name in other.fields if name not in self.fields)]
        for one, two in ((self, other), (other, self)):
            if one.fields.get("draft") == NO_DRAFT != two.fields.get("draft"):
                names = [name for name in names if name in one.fields]
        pairs = [(name, self.fields.get(name, "nothing"), other.fields.get(name, "nothing")) for name in names]
        return [f"{name}: here {_shown(here)}, there {_shown(there)}" for name, here, there in pairs if here != there]

    @classmethod
    def read(cls, value: Any) -> "Fingerprint":
        """The fingerprint in a header.

        Raises:
            InvalidHandoff: the value is not an object.
        """
        if not isinstance(value, dict):
            raise InvalidHandoff(field="fingerprint", found=value, expected="an object")
        return cls(value)


def _shown(value: Any) -> str:
    return shorten(value if isinstance(value, str) else json.dumps(value), 48)
