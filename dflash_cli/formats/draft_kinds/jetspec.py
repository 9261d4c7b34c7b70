"""JetSpec in the speculators dialect: DFlash trained causally on the block's own tokens, for trees."""

from collections.abc import Mapping
from typing import ClassVar

from dflash_cli.formats.dialect import FORMATS
from dflash_cli.formats.draft_kinds.body import DERIVED, DFLASH_LAYERS, OUT, QWEN3_HEAD, REDUCED, SIZES, WIDTH
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.draft_kinds.table import Key


@FORMATS.register("jetspec")
class JetSpec(Kind):
    """JetSpec (arXiv 2606.18394) as speculators writes it.

    NeMo Automodel writes JetSpec drafts as plain DFlash with `dflash_config.causal: true`; these are read as DFlash.
    Source: vllm-project/speculators#747 (open), models/jetspec/config.py and core.py.
    """

    title = "JetSpec"
    types = frozenset({"jetspec"})
    architectures = r"JetSpec"
    difference = "a block holds the tokens themselves instead of masks, and its rows attend causally, for trees"
    head = "none beside DFlash's layers; rows of a block of {block} attend causally"
    stated = (
        *SIZES,
        QWEN3_HEAD,
        WIDTH,
        REDUCED,
        Key(size="block", names=("block_size",)),
        Key(size="taps", names=("aux_hidden_state_layer_ids",), form="layers"),
        Key(size="temperature", names=("kd_temperature",), form="positive", is_needed=False),
    )
    derived: ClassVar[Mapping[str, str]] = {**DERIVED, **OUT}
    parts = DFLASH_LAYERS
    why_not_renamed = "a DFlash reader would put masks where it was trained with tokens"
