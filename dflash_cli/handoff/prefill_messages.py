"""The messages between a run and its prefill process. Each is one line of JSON.

to the process       content                  answer
WorkerSpec           the pair to load         Loaded
Opening              the location to open     Opened
PrefillRequest       requests to hand off     Sent

After an error the process answers with a `Refusal` and ends.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_runtime.scheduling.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The location of the hand-offs, how long to wait for this process there, and the secret of both processes."""

    place: str
    timeout_s: float
    secret: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRequest:
    """Requests to hand off, each under its key."""

    keys: tuple[str, ...]
    prompts: list[list[int]]
    params: list[SamplingParams]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The pair is loaded, and has these fingerprint fields."""

    fingerprint: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Opened:
    """The location is open."""

    opened: bool = True


@dataclass(frozen=True, slots=True)
class Sent:
    """The requests were handed off, or refused."""

    num_sent: int
