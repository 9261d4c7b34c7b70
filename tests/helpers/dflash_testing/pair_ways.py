"""How dflash runs each published pair: the kind of the draft, the way of the target, and the reason of a refusal."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.formats.detection import detect
from dflash_runtime.checkpoint.pair import TargetSource, check_pair
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.targets.runs_here import how_it_runs
from dflash_runtime.checkpoint.targets.target_facts import decoder_config
from dflash_runtime.errors import DFlashError
from dflash_testing.checkpoints import Json
from dflash_testing.published_pairs import PublishedPair, write_headers

EIGHT_BITS = {
    "model.layers.0.mlp.up_proj.weight": ("F8_E4M3", (128, 128)),
    "model.layers.0.mlp.up_proj.weight_scale_inv": ("F32", (1, 1)),
}
CUT_BLOCKS = {
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": ("F8_E4M3", (576, 6144)),
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv": ("F32", (5, 48)),
}
"""Tensor headers of a target with fp8 weights, in blocks of 128: a whole block, and GLM-5.1's cut ones, which only
latent attention has."""

ASKED = "layout-not-stated"
"""The id of the refusal of a draft that runs if the user states the layout of its blocks."""


@dataclass(frozen=True, slots=True)
class PairWay:
    """One pair: the title of its draft's kind, the type of its target's decoder, and how it runs."""

    kind: str
    target_type: str
    words: str


def write_target(path: Path, config: Json) -> TargetSource:
    """Write a target as its config and empty headers, except for fp8 tensors if the config states fp8."""
    is_fp8 = config.get("quantization_config", {}).get("quant_method") == "fp8"
    is_latent = decoder_config(config, path)[0].get("kv_lora_rank") is not None
    write_headers(path, config, (EIGHT_BITS | (CUT_BLOCKS if is_latent else {})) if is_fp8 else {})
    return open_target(path)


def way_of(pair: PublishedPair, folder: Path) -> PairWay:
    """Return how a pair runs, from its config and headers."""
    target = write_target(folder / "config alone" / "target", pair.target_config())
    draft, _ = pair.write(folder)
    refusal = refusal_of(draft, target)
    words = how_it_runs(target).words
    if refusal is not None and refusal.id == ASKED:
        words += "; `--layout` must be given"
    elif refusal is not None:
        reason = in_words(refusal, {str(refusal.path): "", str(target.checkpoint.path): pair.of})
        words = f"draft refused: {reason}" + (f"; target {words}" if words.startswith("refused") else "")
    return PairWay(kind_of_draft(draft), target.facts.model_type, words)


def refusal_of(draft: Path, target: TargetSource) -> DFlashError | None:
    """Return why a draft does not run, or None."""
    try:
        check_pair(open_draft(draft).source, target)
    except DFlashError as error:
        return error
    return None


def in_words(error: DFlashError, names: Mapping[str, str]) -> str:
    """Return the first line of an error, with names instead of paths, and without the evidence for a kind."""
    text = error.message.splitlines()[0]
    for path, name in names.items():
        text = text.replace(path, name)
    return re.sub(r"^.*not DFlash: ", "", text.removeprefix(": ")).replace("|", "/")


def kind_of_draft(draft: Path) -> str:
    """Return the title of a draft's kind, without its dialect."""
    title = detect(Checkpoint(draft)).format.title
    return title.partition(",")[0].removesuffix(" variant")
