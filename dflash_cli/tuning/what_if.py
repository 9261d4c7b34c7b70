"""What acceptance would be in other number formats: of the draft, of keys and values, or of the target.

Formats are simulated by rounding. A target that is rounded says other text, so that its answers differ from those of
the pair as it is; prompts are the same, and are what is paired.
"""

from dataclasses import dataclass, replace

from dflash_cli.tuning.roundings import KV, WEIGHTS, round_kv, round_weights
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.device.loading import LoadedPair
from dflash_runtime.errors import UnsupportedError, UsageError
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.target import Target, target_families, target_shapes
from dflash_runtime.models.weights import load_weights

FORMATS = {"draft": tuple(WEIGHTS), "kv": tuple(KV), "target": tuple(WEIGHTS)}
"""What can be rounded, and to what; `kv` is that of target and draft."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Formats of one or more parts of a pair: `draft=fp8`, or `draft=fp8+kv=fp8` at once."""

    formats: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return "+".join(f"{part}={name}" for part, name in self.formats)

    @property
    def file_name(self) -> str:
        """The name without what shells and file systems take otherwise."""
        return "what-if-" + self.name.replace("=", "-").replace("+", "-")


def parse_what_ifs(text: str) -> list[WhatIf]:
    """`draft=fp8,kv=fp8,draft=fp8+kv=fp8`; `all` is every format of every part by itself.

    Raises:
        UsageError: a part or a format that is not known.
    """
    if text.strip() == "all":
        return [WhatIf(((part, name),)) for part, names in FORMATS.items() for name in names]
    return [WhatIf(tuple(_parse(item.strip()) for item in group.split("+"))) for group in text.split(",")]


def _parse(text: str) -> tuple[str, str]:
    part, _, name = text.partition("=")
    if name not in FORMATS.get(part, ()):
        known = "; ".join(f"{part}={'|'.join(names)}" for part, names in FORMATS.items())
        raise UsageError(
            f"--what-if {text}: expected PART=FORMAT, of {known}", hint="or all; + joins several in one run"
        )
    return part, name


def changes_nothing(what_if: WhatIf, pair: LoadedPair) -> bool:
    """Whether the pair has these formats already: bfloat16 in a run in bfloat16."""
    return pair.placement.dtype_name == "bfloat16" and all(name == "bf16" for _, name in what_if.formats)


def rounded(pair: LoadedPair, source: TargetSource, what_if: WhatIf) -> LoadedPair:
    """The pair with what a what-if names rounded. A target is loaded once more, beside the one that is there.

    Raises:
        UnsupportedError: a target that is not run by this package's own code, where it has to be rounded or its KV.
    """
    formats = dict(what_if.formats)
    assert pair.draft is not None
    assert pair.draft_weights is not None
    found = replace(pair, rounding=what_if.name)
    if "kv" in formats:
        kernels = round_kv(pair.placement.kernels, formats["kv"])
        found = replace(found, placement=replace(pair.placement, kernels=kernels))
    if formats.keys() & {"kv", "target"}:
        found = replace(found, target=_load(pair, source, found.placement, formats.get("target")))
    if "draft" in formats:
        found = replace(found, draft_weights=round_weights(pair.draft_weights, formats["draft"]))
    return found.with_draft(pair.draft.config)


def _load(pair: LoadedPair, source: TargetSource, placement: Placement, name: str | None) -> Target:
    if pair.target_runtime != "native":
        raise UnsupportedError(
            f"{source.checkpoint.path}: transformers' code runs the target, whose weights and KV are not rounded here",
            hint="--what-if draft=... rounds the draft alone",
        )
    weights = load_weights(source.checkpoint, target_shapes(source), placement)
    family = target_families()[source.config.model_type]
    return family(source.config, weights if name is None else round_weights(weights, name), placement)
