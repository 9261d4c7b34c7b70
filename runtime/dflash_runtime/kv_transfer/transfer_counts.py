"""Counts of hand-offs. Needs no torch."""

from dataclasses import dataclass, field

from dflash_runtime.notices import Notice


@dataclass(slots=True)
class TransferCounts:
    """Counts of one call's hand-offs, and their problems."""

    num_loaded: int = 0
    num_sent: int = 0
    num_bytes: int = 0
    num_given_up: int = 0  # requests that were prefilled here instead
    why_given_up: str = ""  # the reason for the first of these requests
    problems: dict[Notice, None] = field(default_factory=dict)  # misfits of forced hand-offs, each once
