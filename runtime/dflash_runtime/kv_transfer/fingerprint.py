"""The fingerprint of a pair: everything that two engines must share so that one can use the KV of the other."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_runtime.errors import InvalidHandoff


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Fields by name: weights of both models, layers, taps, K, rope, windows, causality, dtype, page size, layout.

    Values are plain JSON values and not one hash, so that an error can name the fields that differ.
    """

    fields: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """A digest of all fields: 16 bytes in hexadecimal, the same in every process."""
        text = json.dumps(dict(self.fields), sort_keys=True, allow_nan=False)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def differences(self, other: "Fingerprint") -> list[str]:
        """One text for each field that differs: `name: here <value of self>, there <value of other>`."""
        names = [*self.fields, *(name for name in other.fields if name not in self.fields)]
        pairs = [(name, self.fields.get(name, "nothing"), other.fields.get(name, "nothing")) for name in names]
        return [
            f"{name}: here {_shorten(here)}, there {_shorten(there)}" for name, here, there in pairs if here != there
        ]

    @classmethod
    def read(cls, value: Any) -> "Fingerprint":
        """The fingerprint in a header.

        Raises:
            InvalidHandoff: the value is not an object.
        """
        if not isinstance(value, dict):
            raise InvalidHandoff(field="fingerprint", found=value, expected="an object")
        return cls(value)


def _shorten(value: Any, limit: int = 48) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
