"""The messages between the two sides of a connection, and their form as JSON. `sending.py` describes their order."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from dflash_runtime.documents import OPTIONAL, Limits, from_json, to_json
from dflash_runtime.errors import InvalidConfig
from dflash_runtime.json_values import as_object
from dflash_runtime.phrases import shorten

VERSION = 2
"""Version of the messages. Both sides must have the same."""

LONGEST_KEY, LONGEST_REASON = 255, 1000
"""The most characters of a key, and of a reason that is shown. A longer reason is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """The first message of each side: the version of its messages, its carrier, and the port of its store.

    `nonce` is a random text that the other side's proof covers.
    """

    hello: int = VERSION
    carrier: str
    store_port: Annotated[int | None, Limits(least=0, below=1 << 16), OPTIONAL] = None
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class Proof:
    """The second message of each side: HMAC-SHA-256 of both nonces under the secret, in hexadecimal."""

    proof: str


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
        InvalidConfig: the kind is unknown, a key is missing, unknown or wrong, or the hand-off's key is too long.
    """
    values = dict(as_object(value))
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise InvalidConfig("kind", kind, f"one of {', '.join(KINDS)}", id="wrong-value")
    if isinstance(reason := values.get("reason"), str):
        values["reason"] = shorten(reason, LONGEST_REASON)
    message = from_json(KINDS[kind], values)
    if isinstance(message, Message) and len(message.key) > LONGEST_KEY:
        found = shorten(message.key, 40)
        raise InvalidConfig("key", found, f"at most {LONGEST_KEY} characters", id="wrong-value")
    return message
