"""AdaFlash: DFlash with a head that predicts how many tokens to verify."""

from collections.abc import Mapping
from typing import Any, ClassVar

from dflash_cli.formats.dialect import FORMATS
from dflash_cli.formats.draft_kinds.body import DERIVED, DFLASH_KEYS, DFLASH_LAYERS, OUT
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.draft_kinds.table import Key, Service, Tensors
from dflash_cli.formats.fields import look_up

NOTE = "it ignores the length head and verifies whole blocks"
SWITCHES = ("thresh_head_direct_len", "use_thresh_head_two_model", "use_thresh_head_subsequent")


def _linear(name: str, rows: str, columns: str) -> dict[str, str]:
    return {f"{name}.weight": f"{rows}, {columns}", f"{name}.bias": rows}


@FORMATS.register("adaflash")
class AdaFlash(Kind):
    """AdaFlash, under the architecture name DFlashDraftModel.

    Sources: ZinYY/AdaFlash (commit 65d9a5e) SpecForge/modeling/draft/dflash.py and configs; sgl-project/sglang#34171,
    which is open.
    """

    title = "AdaFlash"
    markers = frozenset(SWITCHES)
    tensors = r"thresh_head_(two_model|subsequent)\.|prob_head\."
    difference = "a length head predicts from the block how many tokens to verify"
    head = "a length head of width {bottleneck}"
    stated = (
        *DFLASH_KEYS,
        Key(size="direct", names=("dflash_config.thresh_head_direct_len",), form="flag"),
        Key(size="pooled", names=("dflash_config.use_thresh_head_two_model",), form="flag"),
        Key(size="by_logits", names=("dflash_config.use_thresh_head_subsequent",), form="flag", is_needed=False),
        Key(size="bottleneck", names=("dflash_config.thresh_head_bottleneck_dim",), default=256),
        Key(size="accepts", names=("dflash_config.use_prob_head",), form="flag", is_needed=False),
        Key(size="accept_form", names=("dflash_config.prob_head_model",), form="text", is_needed=False),
        Key(size="accept_layers", names=("dflash_config.prob_head_num_layers",), is_needed=False),
        Key(size="accept_width", names=("dflash_config.prob_head_bottleneck_dim",), is_needed=False),
    )
    derived: ClassVar[Mapping[str, str]] = {**DERIVED, **OUT}
    free = r"prob_head\."
    parts = (
        *DFLASH_LAYERS,
        Tensors(
            shapes={
                **_linear("thresh_head_two_model.down", "bottleneck", "2*hidden"),
                **_linear("thresh_head_two_model.res.0", "bottleneck", "bottleneck"),
                **_linear("thresh_head_two_model.out", "1", "bottleneck"),
            },
            when="pooled",
        ),
        Tensors(
            shapes={
                **_linear("thresh_head_subsequent.proj.0", "bottleneck", "7"),
                **_linear("thresh_head_subsequent.proj.2", "1", "bottleneck"),
            },
            when="by_logits",
        ),
    )
    services = (
        Service(engine="sglang", architectures={"DFlashDraftModel": (0, 5, 23)}, note=NOTE),
        Service(engine="transformers", architectures={"DFlashDraftModel": (5, 23)}, note=NOTE),
    )

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        """A switch counts only if it is true, because a plain DFlash draft may state false."""
        if "speculators_model_type" in config:
            return None
        for key in SWITCHES:
            for name in (f"dflash_config.{key}", key):
                if look_up(config, name) is True:
                    return f"config.json has {key} true"
        return self._tensor(tensor_names)
