"""DFlash 2 in the native and the speculators dialect: DFlash with convolutions and a candidate selector.

Four settings are its own: taps and group size of the convolutions, rank and candidates of the selector. The native
dialect states them in `dflash_config`, where every engine looks, the speculators dialect at the top level. A draft of
this family always proposes over the target's whole vocabulary, because the selector's codebooks have a row per token.
Its input is the target's raw embedding row times `input_embedding_scale`.
Sources: z-lab/dflash 0.1.0 model.py::DFlash2DraftModel; speculators 0.9.0 models/dflash2; vLLM 0.33.0 algos.py.
"""

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, ClassVar

from dflash_cli.formats.decoder_body import NESTED
from dflash_cli.formats.dialect import FORMATS, Json
from dflash_cli.formats.family_format import FamilyFormat, Variant
from dflash_cli.formats.fields import LOGIT_SCALE, SELECTOR_FIELDS, Keys
from dflash_cli.formats.native import Native
from dflash_cli.formats.relatives import Relative
from dflash_cli.formats.speculators import SpeculatorsFormat
from dflash_cli.formats.speculators_updaters import register_speculator, update_dflash
from dflash_runtime.draft_config import ConvolutionConfig, DraftConfig, SelectorConfig
from dflash_runtime.errors import LossyConversion

FAMILY = "dflash2"
ARCHITECTURE = "DFlash2DraftModel"
FIELDS = SELECTOR_FIELDS


class Marks(Relative):
    """The marks of a DFlash 2 draft."""

    types: ClassVar[frozenset[str]] = frozenset({FAMILY})
    architectures: ClassVar[str] = r".*DFlash2"
    markers: ClassVar[frozenset[str]] = frozenset(FIELDS)
    tensors: ClassVar[str] = r"(layers\.\d+\.)?(attention_conv|mlp_conv)\.|candidate_selector\."


class DFlash2(FamilyFormat):
    """The settings of a DFlash 2 draft."""

    family: ClassVar[str] = FAMILY
    priority: ClassVar[int] = 14
    written_as: ClassVar[str] = ARCHITECTURE
    family_fields: ClassVar[tuple[str, ...]] = FIELDS
    is_trained_non_causal: ClassVar[bool] = True
    family_marks: ClassVar[Relative] = Marks()
    plain_names: ClassVar[frozenset[str]] = frozenset(
        {ARCHITECTURE, "Qwen3DFlash2DraftModel", "MiniMaxDFlash2DraftModel", "DFlashDraftModel"}
    )
    """Sources: NeMo Automodel; SGLang 0.5.23 models/dflash.py, where MiniMax's name stands for the same model."""

    def read_family(self, stated: Callable[[str], Any]) -> Json:
        kernel, group, rank, top_k = map(stated, FIELDS)
        return {
            "convolution": ConvolutionConfig(kernel_size=kernel, group_size=group),
            "selector": SelectorConfig(rank=rank, top_k=top_k),
        }

    def write_family(self, config: DraftConfig) -> Json:
        """See `Format`.

        Raises:
            LossyConversion: a reduced vocabulary, over which a selector cannot choose.
        """
        assert config.convolution is not None
        assert config.selector is not None
        if config.has_reduced_vocab:
            raise LossyConversion(
                f"draft_vocab_size {config.draft_vocab_size} of {config.vocab_size}: a candidate selector needs the "
                f"target's whole vocabulary",
                id="selector-vocabulary",
                field="draft_vocab_size",
                found=config.draft_vocab_size,
            )
        return {
            "conv_kernel_size": config.convolution.kernel_size,
            "conv_group_size": config.convolution.group_size,
            "selector_rank": config.selector.rank,
            "selector_top_k": config.selector.top_k,
        }


@FORMATS.register("dflash2-variant")
class DFlash2Variant(Variant, Marks):
    """DFlash 2 with other layers, such as DFlash2BeamDraftModel, for which vLLM has a model of its own."""

    title: ClassVar[str] = "DFlash 2 variant"
    plain_names: ClassVar[frozenset[str]] = DFlash2.plain_names


@FORMATS.register(FAMILY)
class DFlash2Native(DFlash2, Native):
    """Native checkpoints of z-lab and others."""

    word: ClassVar[str] = "native"
    title: ClassVar[str] = "DFlash 2, native dialect"
    architecture: ClassVar[str | None] = None
    takes_target_scale: ClassVar[bool] = False
    keys: ClassVar[Keys] = {**Native.keys, **{key: (f"{NESTED}{key}", key) for key in FIELDS}}
    unstated: ClassVar[frozenset[str]] = Native.unstated | {LOGIT_SCALE}


@FORMATS.register("dflash2-speculators")
class DFlash2Speculators(DFlash2, SpeculatorsFormat):
    """Checkpoints of speculators 0.8 and 0.9."""

    word: ClassVar[str] = "speculators"
    title: ClassVar[str] = "DFlash 2, speculators dialect"
    kind: ClassVar[tuple[str, str] | None] = ("speculators_model_type", FAMILY)
    keys: ClassVar[Keys] = {**SpeculatorsFormat.keys, **{key: (key,) for key in FIELDS}}


@register_speculator(FAMILY)
def update_dflash2(config_dict: Mapping[str, Any], pre_trained_config: MutableMapping[str, Any]) -> None:
    """`update_dflash`, and the four settings in `dflash_config`. Source: vLLM 0.33.0 algos.py.

    Raises:
        InvalidConfig, UnsupportedError: see `update_dflash`.
    """
    update_dflash(config_dict, pre_trained_config)
    pre_trained_config["architectures"] = [ARCHITECTURE]
    found = {key: config_dict[key] for key in FIELDS if config_dict.get(key) is not None}
    pre_trained_config["dflash_config"] = {**pre_trained_config["dflash_config"], **found}
