"""Published sizes of the targets in tests/data/pairs.jsonl, one row of tests/data/target_sizes.jsonl per shape.

The configs in tests/data/targets have real keys and small widths. A row adds the real widths of targets that fit one
GPU. Other rows state only how large a target is, or why it cannot be measured.
"""

import json
from dataclasses import dataclass, field, replace

from dflash_testing.checkpoints import Json
from dflash_testing.paths import ROOT
from dflash_testing.published_pairs import PublishedPair

TABLE = ROOT / "tests" / "data" / "target_sizes.jsonl"
GPU_GB = 141
"""Memory of one H200 in 10**9 bytes."""


@dataclass(frozen=True, kw_only=True)
class TargetSizes:
    """One row.

    of          published names of all targets with this shape
    billions    10**9 published weights, without parts for images and audio if `sizes` are given
    bytes_each  bytes of a weight in memory, 2 for bfloat16
    sizes       changes to the decoder's config beyond `PublishedPair.sizes`; empty if the target does not fit one GPU
    source      where the sizes come from
    unsure      sizes that the source may not have
    unknown     the reason why sizes are missing, if the target would fit
    """

    of: list[str]
    billions: float
    bytes_each: int = 2
    sizes: Json = field(default_factory=dict)
    source: str = ""
    unsure: str = ""
    unknown: str = ""

    @property
    def gigabytes(self) -> int:
        """Published weights in 10**9 bytes."""
        return round(self.billions * self.bytes_each)

    @property
    def why_not(self) -> str | None:
        """Why one H200 cannot measure the target, or None if it can."""
        if self.sizes:
            return None
        return f"not measured: {self.unknown}" if self.unknown else f"does not fit one H200: {self.gigabytes} GB"


def read_sizes() -> dict[str, TargetSizes]:
    """Return published name -> sizes."""
    rows = [TargetSizes(**json.loads(line)) for line in TABLE.read_text(encoding="utf-8").splitlines()]
    return {name: row for row in rows for name in row.of}


def in_full(pair: PublishedPair, sizes: TargetSizes) -> PublishedPair:
    """Return the pair with a target of the published sizes, and a draft of its width."""
    return replace(pair, sizes={**pair.sizes, **sizes.sizes})
