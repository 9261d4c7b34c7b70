"""Simulate acceptance with other number formats of the draft, of keys and values, or of the target.

Formats are simulated by rounding. A rounded target writes different answers, so results are paired by prompt.
"""

from dataclasses import replace

from dflash_cli.tuning.roundings import round_kv, round_weights
from dflash_cli.tuning.what_if import WhatIf
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.errors import UnsupportedError
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.target import Target, target_families, target_shapes
from dflash_runtime.models.target_loading import find_target_runtime
from dflash_runtime.models.weights import load_weights


def changes_nothing(what_if: WhatIf, pair: LoadedPair) -> bool:
    """Return whether the pair has these formats already: bfloat16 in a run in bfloat16."""
    return pair.placement.dtype_name == "bfloat16" and all(name == "bf16" for _, name in what_if.formats)


def refuse_rounding(pair: LoadedPair, source: TargetSource, what_if: WhatIf) -> None:
    """Refuse to round the target or its KV if transformers' code runs the target, and KV or a target in few bits.

    Raises:
        UnsupportedError: names the what-if.
    """
    if pair.target_quantization is not None and "target" in dict(what_if.formats):
        raise UnsupportedError(
            f"the target's weights are quantised already ({pair.target_quantization})",
            id="quantised-target-rounded",
            path=source.checkpoint.path,
            field="--what-if",
            found=what_if.name,
            hint="round the draft or KV: --what-if draft=FORMAT",
        )
    if pair.placement.has_fp8_pages and "kv" in dict(what_if.formats):
        raise UnsupportedError(
            "this run stores KV in FP8 already",
            id="fp8-kv-rounded",
            field="--what-if",
            found=what_if.name,
            hint="--kv-dtype auto",
        )
    if pair.target_runtime != "native" and {"kv", "target"} & {part for part, _ in what_if.formats}:
        raise UnsupportedError(
            "transformers' code runs this target, so its weights and KV cannot be rounded",
            id="hosted-target-rounded",
            path=source.checkpoint.path,
            field="--what-if",
            found=what_if.name,
            hint="round the draft alone: --what-if draft=FORMAT",
        )


def rounded(pair: LoadedPair, source: TargetSource, what_if: WhatIf) -> LoadedPair:
    """Return the pair with some parts rounded. Rounding the target or KV loads a second copy of the target.

    Raises:
        UnsupportedError: the target or its KV should be rounded, but transformers' code runs the target.
    """
    refuse_rounding(pair, source, what_if)
    formats = dict(what_if.formats)
    assert pair.draft is not None
    assert pair.draft_weights is not None
    found = replace(pair, rounding=what_if.name)
    if "kv" in formats:
        kernels = round_kv(pair.placement.kernels, formats["kv"])
        found = replace(found, placement=replace(pair.placement, kernels=kernels))
    if formats.keys() & {"kv", "target"}:
        found = replace(found, target=_load(source, found.placement, formats.get("target")))
    if "draft" in formats:
        plain = pair.with_plain_draft().draft_weights
        assert plain is not None
        found = replace(found, draft_weights=round_weights(plain, formats["draft"]))
    return found.with_draft(pair.draft.config)


def _load(source: TargetSource, placement: Placement, name: str | None) -> Target:
    _, config = find_target_runtime(source, "native")
    weights = load_weights(source.checkpoint, target_shapes(source), placement)
    rounded_weights = weights if name is None else round_weights(weights, name)
    return target_families()[config.model_type](config, rounded_weights, placement)
