"""The specification of a conversion."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_runtime.checkpoint.pair import TargetSource

Verification = Literal["none", "roundtrip", "logits"]
"""How a result is verified. `roundtrip` reads it back; `logits` also compares the logits of source and result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionSpec:
    """The dialect of the result and the options of the conversion.

    to                  name of the dialect
    target              the target of the draft, if one is given
    target_reference    the target as the user typed it
    verifier            the name of the target in the result
    allow_lossy         leave out parts that the dialect cannot state
    is_repair           write only what the source determines: a doubt about its training stays in the result
    normalise_taps      sort the tapped layers and list each once
    quantize            the number format of matrices in the result; None keeps the source's
    quantizes_all       round q, k, v and the head too
    max_shard_bytes     most bytes of weights per file. None keeps the source's files
    tokenizer           copy the tokenizer of this GGUF file into the result
    argv                the command, for the manifest
    """

    to: str
    target: TargetSource | None = None
    target_reference: str | None = None
    verifier: str | None = None
    allow_lossy: bool = False
    is_repair: bool = False
    normalise_taps: bool = False
    quantize: Literal["fp8"] | None = None
    quantizes_all: bool = False
    max_shard_bytes: int | None = None
    tokenizer: Path | None = None
    argv: tuple[str, ...] = ()
