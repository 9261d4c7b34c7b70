"""DSpark in the native and the speculators dialect: DFlash with a Markov head and a prediction of acceptance.

A block has one of two layouts, which `sample_from_anchor` states, or `dspark_bonus_anchor` with the opposite value. A
config without either key has an unknown layout, because readers differ:

    vLLM, native file            anchor-first
    SGLang                       anchor-first; it reads only the top level
    vLLM, speculators file       fill-in
    speculators' own class       anchor-first; it always writes the key
    llama.cpp, speculators file  fill-in, by its pull request 26275

`block_size` counts rows, as in `DraftConfig`: an anchor-first block of N rows drafts N tokens, a fill-in block N - 1.
speculators counts so in both layouts. For a native file, vLLM and SGLang by default draft `block_size` tokens in both
layouts, so a fill-in block gets a row more than in training; every serve command therefore states the number.

Keys are at the top level, in `dflash_config`, or both. vLLM and SGLang read the Markov head and the layout at the top
level only, and vLLM from 0.27 on refuses a true `dflash_config.sample_from_anchor`.
Sources: speculators 0.9.0 models/dspark; vLLM 0.25.0 to 0.33.0 qwen3_dspark.py, algos.py and dspark/speculator.py;
SGLang 0.5.23 models/dspark.py, dspark_config.py; deepseek-ai/DeepSpec.
"""

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, ClassVar

from dflash_cli.formats.decoder_body import NESTED
from dflash_cli.formats.dialect import FORMATS, Json, named_architectures
from dflash_cli.formats.family_format import FamilyFormat, Variant
from dflash_cli.formats.fields import Keys
from dflash_cli.formats.native import Native
from dflash_cli.formats.relatives import Relative
from dflash_cli.formats.speculators import BODY, SpeculatorsFormat
from dflash_cli.formats.speculators_updaters import register_speculator, update_dflash
from dflash_runtime.draft_config import DraftConfig, MarkovConfig
from dflash_runtime.errors import MISSING, InvalidConfig

FAMILY = "dspark"
ARCHITECTURE = "Qwen3DSparkModel"
ANCHOR, BONUS = "sample_from_anchor", "dspark_bonus_anchor"
TOP_K = "dspark_draft_topk"
HEAD_FIELDS = ("markov_rank", "markov_head_type", TOP_K, "enable_confidence_head", "confidence_head_with_markov")
MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
"""Keys of the mask token. vLLM takes the first."""

MODELS = frozenset({ARCHITECTURE, "Qwen3OmniDSparkModel"})
"""The architecture names that vLLM keeps in a speculators config."""


class Marks(Relative):
    """The marks of a DSpark draft. Files with markov_rank 0 are published under DFlash's name."""

    types: ClassVar[frozenset[str]] = frozenset({FAMILY})
    projectors: ClassVar[frozenset[str]] = frozenset({FAMILY})
    architectures: ClassVar[str] = r".*DSpark"
    markers: ClassVar[frozenset[str]] = frozenset(
        {"markov_rank", "markov_head_type", "dspark_markov_rank", TOP_K, BONUS, "dspark_noise_token_id"}
    )
    tensors: ClassVar[str] = r"markov_|confidence_|gate_proj\.|joint_proj\."


class DSpark(FamilyFormat):
    """The settings of a DSpark draft."""

    priority: ClassVar[int] = 16
    family: ClassVar[str] = FAMILY
    serve_method: ClassVar[str] = FAMILY
    samples_from_anchor: ClassVar[bool] = True
    projectors: ClassVar[frozenset[str]] = frozenset({FAMILY})
    written_as: ClassVar[str] = ARCHITECTURE
    family_fields: ClassVar[tuple[str, ...]] = (*HEAD_FIELDS, ANCHOR, BONUS)
    family_marks: ClassVar[Relative] = Marks()
    plain_names: ClassVar[frozenset[str]] = frozenset(
        {ARCHITECTURE, "DSparkDraftModel", "DFlashDraftModel", "Qwen3DFlashDraftModel"}
    )

    def unserved(self, config: Mapping[str, Any]) -> dict[str, str]:
        """DFlash's unserved settings, without the anchor and the head, which this family has."""
        own = {ANCHOR} | ({"projector_type"} if self._has_own_projector(config) else set())
        return {key: text for key, text in super().unserved(config).items() if key not in own}

    def _has_own_projector(self, config: Mapping[str, Any]) -> bool:
        nested = config.get("dflash_config")
        stated = nested if isinstance(nested, dict) else {}
        found = stated.get("projector_type", config.get("projector_type"))
        return isinstance(found, str) and found in self.projectors

    def has_unknown_layout(self, stated: Callable[[str], Any]) -> bool:
        return _layout(stated) is None

    def read_family(self, stated: Callable[[str], Any]) -> Json:
        rank, head_type, top_k = (_or_none(stated(key)) for key in HEAD_FIELDS[:3])
        if rank is None:
            raise InvalidConfig("markov_rank", MISSING, "an integer; 0 for a draft without a Markov head")
        markov = None if rank == 0 else MarkovConfig(rank=rank, head_type=head_type or "vanilla", top_k=top_k)
        has_confidence = _flag(stated, "enable_confidence_head")
        has_confidence = self.kind is not None if has_confidence is None else has_confidence
        reads_token = _flag(stated, "confidence_head_with_markov") is not False and markov is not None
        layout = _layout(stated)
        return {
            "markov": markov,
            "has_confidence": has_confidence,
            "confidence_reads_token": reads_token if has_confidence else True,
            "sample_from_anchor": self.kind is None if layout is None else layout,
        }

    def write_family(self, config: DraftConfig) -> Json:
        markov = config.markov
        return {
            "markov_rank": 0 if markov is None else markov.rank,
            "markov_head_type": "vanilla" if markov is None else markov.head_type,
            **({} if markov is None or markov.top_k is None else {TOP_K: markov.top_k}),
            "enable_confidence_head": config.has_confidence,
            "confidence_head_with_markov": config.confidence_reads_token and markov is not None,
            ANCHOR: config.sample_from_anchor,
            BONUS: not config.sample_from_anchor,
        }


@FORMATS.register("dspark-variant")
class DSparkVariant(Variant, Marks):
    """DSpark with other layers, such as Gemma4DSparkModel, for which engines have models of their own."""

    title: ClassVar[str] = "DSpark variant"
    serve_method: ClassVar[str] = FAMILY
    samples_from_anchor: ClassVar[bool] = True
    plain_names: ClassVar[frozenset[str]] = DSpark.plain_names


@FORMATS.register(FAMILY)
class DSparkNative(DSpark, Native):
    """Native checkpoints of deepseek-ai, SpecForge and others."""

    word: ClassVar[str] = "native"
    title: ClassVar[str] = "DSpark, native dialect"
    architecture: ClassVar[str | None] = None
    takes_target_scale: ClassVar[bool] = False
    keys: ClassVar[Keys] = {
        **Native.keys,
        **{key: (f"{NESTED}{key}", key) for key in HEAD_FIELDS},
        "markov_rank": (f"{NESTED}markov_rank", "markov_rank", "dspark_markov_rank"),
        "markov_head_type": (f"{NESTED}markov_head_type", "markov_head_type", "dspark_markov_head_type"),
        "mask_token_id": (f"{NESTED}mask_token_id", *MASK_KEYS),
        "block_size": (f"{NESTED}block_size", "block_size", "dspark_block_size"),
        "target_layer_ids": (f"{NESTED}target_layer_ids", "target_layer_ids", "dspark_target_layer_ids"),
        **{key: (key, f"{NESTED}{key}") for key in (ANCHOR, BONUS)},
    }

    def write_config(self, config: DraftConfig, carried: Mapping[str, Any]) -> Json:
        """Write the family's keys at the top level too, where vLLM and SGLang read them, and the layout only there.

        vLLM from 0.27 on refuses every draft whose `dflash_config` states `sample_from_anchor: true`.
        Source: 0.33.0 v1/worker/gpu/spec_decode/dflash/speculator.py:64. DSpark's speculator calls its constructor.
        """
        written = super().write_config(config, carried)
        nested = {key: value for key, value in written["dflash_config"].items() if key not in (ANCHOR, BONUS)}
        return {**written, "dflash_config": nested, **self.write_family(config)}


@FORMATS.register("dspark-speculators")
class DSparkSpeculators(DSpark, SpeculatorsFormat):
    """Checkpoints of speculators 0.7 to 0.9."""

    word: ClassVar[str] = "speculators"
    title: ClassVar[str] = "DSpark, speculators dialect"
    kind: ClassVar[tuple[str, str] | None] = ("speculators_model_type", FAMILY)
    written_as: ClassVar[str] = "DSparkDraftModel"
    keys: ClassVar[Keys] = {
        **SpeculatorsFormat.keys,
        **{key: (key,) for key in (*HEAD_FIELDS, BONUS)},
        TOP_K: (BODY + TOP_K,),
    }

    def write_family(self, config: DraftConfig) -> Json:
        return {key: value for key, value in super().write_family(config).items() if key not in (BONUS, TOP_K)}

    def write_config(self, config: DraftConfig, carried: Mapping[str, Any]) -> Json:
        """Write the number of candidates and the causality among the decoder's keys too, where vLLM finds them.

        vLLM does not read sliding_window_non_causal of a DSpark draft, and takes sliding layers for causal.
        """
        written = super().write_config(config, carried)
        if config.is_causal is not None:
            written["transformer_layer_config"]["is_causal"] = config.is_causal
        if config.markov is not None and config.markov.top_k is not None:
            written["transformer_layer_config"][TOP_K] = config.markov.top_k
        return written


@register_speculator(FAMILY)
def update_dspark(config_dict: Mapping[str, Any], pre_trained_config: MutableMapping[str, Any]) -> None:
    """Turn the decoder config of a speculators DSpark draft into the config that an engine sees, in place.

    The keys are at the top level of the result. A missing `sample_from_anchor` means fill-in.
    Source: vLLM 0.33.0 algos.py.

    Raises:
        InvalidConfig, UnsupportedError: see `update_dflash`.
    """
    seen: dict[str, Any] = {}
    update_dflash(config_dict, seen)
    named = [name for name in named_architectures(config_dict) if name in MODELS]
    is_anchor_first = config_dict.get(ANCHOR, False)
    found = {
        "architectures": named or [ARCHITECTURE],
        ANCHOR: is_anchor_first,
        BONUS: not is_anchor_first,
        "eagle_aux_hidden_state_layer_ids": seen["eagle_aux_hidden_state_layer_ids"],
        "target_layer_ids": seen["dflash_config"]["target_layer_ids"],
    }
    copied = {*HEAD_FIELDS, "draft_vocab_size", "target_hidden_size", "mask_token_id", "block_size"} - {TOP_K}
    given = {key: config_dict[key] for key in (*copied, "use_aux_hidden_state") if config_dict.get(key) is not None}
    pre_trained_config.update({**found, **given})


def _layout(stated: Callable[[str], Any]) -> bool | None:
    """Whether a block is anchor-first; None if no key states it.

    Raises:
        InvalidConfig: a wrong type, or two keys that contradict each other.
    """
    anchor, bonus = _flag(stated, ANCHOR), _flag(stated, BONUS)
    if anchor is not None and anchor is bonus:
        raise InvalidConfig(BONUS, bonus, f"{str(not anchor).lower()}, since {ANCHOR} is {str(anchor).lower()}")
    return anchor if anchor is not None or bonus is None else not bonus


def _flag(stated: Callable[[str], Any], key: str) -> bool | None:
    value = _or_none(stated(key))
    if value is not None and not isinstance(value, bool):
        raise InvalidConfig(key, value, "true or false")
    return value


def _or_none(value: Any) -> Any:
    return None if value is MISSING else value
