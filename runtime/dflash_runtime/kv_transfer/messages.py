"""The messages between the two sides of a connection, and their form as JSON. `sending.py` describes their order."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from dflash_runtime.documents import OPTIONAL, from_json, to_json
from dflash_runtime.errors import InvalidConfig
from dflash_runtime.json_values import as_object

VERSION = 1
"""Version of the messages. Both sides must have the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """The first message of each side: the version of its messages, its carrier, and the port of its store."""

    hello: int = VERSION
    carrier: str
    store_port: Annotated[int | None, OPTIONAL] = None


@dataclass(frozen=True, slots=True)
class Message:
    """A message about one want: its key and its number."""

    key: str
    number: int


class Want(Message):
    """A load has begun."""


@dataclass(frozen=True, slots=True)
class Offer(Message):
    """The hand-off is saved. `directions` tells the decode side's carrier how to fetch its tensors."""

    header: Mapping[str, Any]
    directions: Mapping[str, Any]


class Take(Message):
    """The decode side has room for the tensors."""


class Got(Message):
    """All tensors have arrived undamaged."""


@dataclass(frozen=True, slots=True)
class Refused(Message):
    """Nothing will be saved under the key."""

    reason: str


@dataclass(frozen=True, slots=True)
class Drop(Message):
    """The load was cancelled or has failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Bye:
    """This side closes."""


KINDS: Mapping[str, type[Message | Bye]] = {
    "want": Want, "offer": Offer, "take": Take, "got": Got, "refused": Refused, "drop": Drop, "bye": Bye,
}  # fmt: skip


def message_to_json(message: Message | Bye) -> dict[str, Any]:
    """A message with its kind, as a JSON object."""
    kind = next(name for name, known in KINDS.items() if type(message) is known)
    return {"kind": kind, **to_json(message)}


def read_message(value: Mapping[str, Any]) -> Message | Bye:
    """The message of a JSON object.

    Raises:
        InvalidConfig: the kind is unknown, or a key is missing, unknown or wrong.
    """
    values = dict(as_object(value))
    kind = values.pop("kind", None)
    if kind not in KINDS:
        raise InvalidConfig("kind", kind, f"one of {', '.join(KINDS)}", id="wrong-value")
    return from_json(KINDS[kind], values)
