"""What a user asks of a conversion."""

from dataclasses import dataclass
from typing import Literal

from dflash_runtime.checkpoint.pair import TargetSource

Verification = Literal["none", "roundtrip", "logits"]
"""How a result is verified: not, by reading it back, or by comparing logits too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionSpec:
    """The dialect to write, and how.

    to                  name of the dialect
    target              the target the draft belongs to, where one is given
    target_reference    the target as it was typed
    verifier            the name to store for the target
    allow_lossy         leave out what the dialect cannot state
    normalise_taps      put taps in ascending order, once each
    max_shard_bytes     weights a file at most; None keeps the source's files
    argv                the command that asked for it, for the manifest
    """

    to: str
    target: TargetSource | None = None
    target_reference: str | None = None
    verifier: str | None = None
    allow_lossy: bool = False
    normalise_taps: bool = False
    max_shard_bytes: int | None = None
    argv: tuple[str, ...] = ()
