"""What two engines must have in common for the KV of one to mean anything to the other."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_runtime.errors import InvalidHandoff
from dflash_runtime.phrases import shorten


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Field by field: weights of both models, layers, taps, K, rope, windows, causality, dtype, page size, layout.

    Every value is one that JSON has, so that a difference can be named and not only be seen.
    """

    fields: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """16 bytes in hexadecimal, the same wherever the fields are."""
        text = json.dumps(dict(self.fields), sort_keys=True, allow_nan=False)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def differences(self, other: "Fingerprint") -> list[str]:
        """`name: here <value>, there <value>` of each field in which they differ, this one's being here."""
        names = [*self.fields, *(name for name in other.fields if name not in self.fields)]
        pairs = [(name, self.fields.get(name, "nothing"), other.fields.get(name, "nothing")) for name in names]
        return [f"{name}: here {_shown(here)}, there {_shown(there)}" for name, here, there in pairs if here != there]

    @classmethod
    def read(cls, value: Any) -> "Fingerprint":
        """The fingerprint of a header.

        Raises:
            InvalidHandoff: it is no object.
        """
        if not isinstance(value, dict):
            raise InvalidHandoff(f"fingerprint: found {_shown(value)}, expected an object")
        return cls(value)


def _shown(value: Any) -> str:
    return shorten(value if isinstance(value, str) else json.dumps(value), 48)
