"""The native dialect, in which z-lab publishes drafts: a Qwen3-like config with a `dflash_config` object.

Sources: z-lab/dflash model.py (April 2026 and 0.1.0), sgl-project/SpecForge export/checkpoint_io.py.

As in canonical form, layers are numbered from 0 and a tap is a layer's output. A key is at the top level, inside
`dflash_config`, or in both with the same value. Exporters that write variants of this dialect (`automodel`, `mlx`,
`model_optimizer`, `specforge`) and engines that read it (in `engines/`) have subclasses, one file each.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from dflash_cli.formats.decoder_body import (
    BODY_FIELDS,
    BODY_KEYS,
    NESTED,
    carried_keys,
    partial_rope_notes,
    plain_keys,
    prefixed_keys,
    read_draft_body,
    require_object,
    write_body,
)
from dflash_cli.formats.dialect import FORMATS, Format, Json, ParsedConfig, cannot_state, named_architectures
from dflash_cli.formats.fields import AUX_KEY, ZLAB_SCALES, Keys, scales_in_use
from dflash_cli.formats.native_fields import (
    NativeConfig,
    is_contradictory,
    read_causality,
    read_flag,
    read_scales,
    read_swa_windows,
    read_taps,
    stated_causality,
    write_causality,
)
from dflash_cli.formats.unserved import MODE_KEYS, SINK_KEY, find_unserved, naming_unserved, without_sinks
from dflash_runtime.checkpoint.targets.hf_config import read_layer_types
from dflash_runtime.checkpoint.targets.required_fields import require_int
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import MISSING, LossyConversion, UsageError
from dflash_runtime.json_values import as_object
from dflash_runtime.notices import Notice

ARCHITECTURE = "DFlashDraftModel"
NESTED_OR_TOP = ("block_size", "target_layer_ids", "mask_token_id", "num_target_layers", *ZLAB_SCALES)
WINDOW_KEYS = ("use_swa", "swa_window_size")


@FORMATS.register("native")
class Native(Format):
    """Native checkpoints: flat tensor names, no embedding, no head."""

    title: ClassVar[str] = "DFlash, native dialect"
    priority: ClassVar[int] = 100
    writable: ClassVar[bool] = True
    architecture: ClassVar[str | None] = ARCHITECTURE
    guesses_taps: ClassVar[bool] = True
    needed: ClassVar[frozenset[str]] = frozenset({"num_target_layers"})
    takes_target_scale: ClassVar[bool] = True
    keeps_mask: ClassVar[bool] = True
    signs: ClassVar[tuple[str, ...]] = ("dflash_config",)
    containers: ClassVar[tuple[str, ...]] = ("dflash_config",)
    own_prefix: ClassVar[str] = NESTED
    settings: ClassVar[tuple[str, ...]] = (NESTED, "")
    window_keys: ClassVar[tuple[str, ...]] = (f"{NESTED}use_swa",)
    keys: ClassVar[Keys] = {
        **BODY_FIELDS,
        **{key: (f"{NESTED}{key}", key) for key in NESTED_OR_TOP},
        **{key: (key,) for key in ("draft_vocab_size", "target_hidden_size", "quantization_config", AUX_KEY)},
        "causal": ("is_causal", f"{NESTED}causal"),
        "windows": (*BODY_FIELDS["windows"], *(NESTED + key for key in WINDOW_KEYS)),
        "sample_from_anchor": (f"{NESTED}sample_from_anchor", "sample_from_anchor"),
        "has_sinks": (NESTED + SINK_KEY,),
    }
    added: ClassVar[Mapping[str, str]] = {
        key: key
        for key in ("block_size", "target_layer_ids", "mask_token_id", "num_target_layers", "sample_from_anchor")
    }
    unstated: ClassVar[frozenset[str]] = frozenset({"verifier", "target_hidden_size"})

    trains_causal: ClassVar[bool] = True
    """Whether a sliding layer is causal if no key states causality."""

    marks: ClassVar[tuple[str, ...]] = ()
    """Keys of `dflash_config` by which exports of a variant are recognised."""

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        if self.marks:
            nested = as_object(config.get("dflash_config"))
            return next((f"dflash_config.{key} is {nested[key]!r}" for key in self.marks if key in nested), None)
        if ARCHITECTURE in named_architectures(config):
            return f"architectures names {ARCHITECTURE}"
        return "config.json has dflash_config" if isinstance(config.get("dflash_config"), dict) else None

    def read_config(self, config: Mapping[str, Any], path: Path) -> ParsedConfig:
        """Read each key at the top level or inside `dflash_config`.

        Raises:
            InvalidConfig: a key is missing or wrong, or has two different values.
            UnsupportedError: see `naming_unserved`.
        """
        nested = require_object(config.get("dflash_config", {}), "dflash_config", path)
        source = NativeConfig(config, nested, path, self.keys)
        unserved = self.unserved(config)
        with naming_unserved(unserved):
            return replace(self._read(source), unserved=unserved)

    def unserved(self, config: Mapping[str, Any]) -> dict[str, str]:
        return find_unserved(without_sinks(as_object(config.get("dflash_config"))), config)

    def _read(self, source: NativeConfig) -> ParsedConfig:
        config, path = source.top, source.path
        body = read_draft_body(config, path)
        vocab_size = require_int(config, "vocab_size", path)
        draft_vocab_size = config.get("draft_vocab_size")
        layer_types = read_layer_types(config, body["num_layers"], path)
        causal, notes = read_causality(config, source.nested, layer_types, sliding_default=self.trains_causal)
        if config.get("model_type") == "gpt_oss" and config.get("layer_types") is None:
            text = "a gpt_oss config without layer_types: read as full attention, but the gpt_oss class alternates"
            notes.append(Notice(text, id="gpt-oss-without-layer-types"))
        notes += partial_rope_notes(config)
        depth = source.stated("num_target_layers")
        canonical = DraftConfig(
            **body,
            vocab_size=vocab_size,
            draft_vocab_size=vocab_size if draft_vocab_size is None else draft_vocab_size,
            windows=read_swa_windows(source, body["num_layers"]),
            causal=causal,
            block_size=source.integer("block_size"),
            target_layer_ids=read_taps(source, body["num_layers"]),
            mask_token_id=source.integer("mask_token_id"),
            num_target_layers=None if depth in (MISSING, None) else source.integer("num_target_layers"),
            target_hidden_size=config.get("target_hidden_size"),
            model_type=str(config.get("model_type", "qwen3")),
            has_sinks=read_flag(source.nested, SINK_KEY),
            **read_scales(source),
            has_target_scale=self.takes_target_scale and source.stated("input_embedding_scale") in (MISSING, None),
            family=self.family,
            **self.read_family(source.stated),
        )
        is_doubtful = is_contradictory(stated_causality(config, source.nested))
        return ParsedConfig(
            config=canonical,
            carried=_carried(source, self.family_keys()),
            notes=tuple(notes),
            has_doubtful_causality=is_doubtful,
            has_unknown_layout=self.has_unknown_layout(source.stated),
        )

    def family_keys(self) -> set[str]:
        """The keys, without their container, that only this family has."""
        shared = {key for name in NESTED_OR_TOP for key in Native.keys[name]}
        fields = (*NESTED_OR_TOP, *self.family_fields)
        return {key.removeprefix(NESTED) for name in fields for key in self.keys.get(name, ()) if key not in shared}

    def write_config(self, config: DraftConfig, carried: Mapping[str, Any]) -> Json:
        """Write every key wherever some reader looks for it.

        Raises:
            LossyConversion: the dialect cannot state the draft's causality, width or vocabulary.
            UsageError: `num_target_layers` is not known.
        """
        self.refuse_to_write(config)
        causal = write_causality(config)
        nested = {
            **prefixed_keys(carried, NESTED),
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            **({} if causal is None else {"causal": causal}),
            **({SINK_KEY: True} if config.has_sinks else {}),
            **scales_in_use(config, ZLAB_SCALES),
            **self.write_family(config),
        }
        return {
            "architectures": [self.written_as],
            **{"max_window_layers": config.num_layers, **plain_keys(carried)},
            **write_body(config),
            "block_size": config.block_size,
            "num_target_layers": config.num_target_layers,
            **({} if causal is None else {"is_causal": causal}),
            "dflash_config": nested,
        }

    def refuse_to_write(self, config: DraftConfig) -> None:
        """Refuse a draft if readers of this dialect would ignore a part of it.

        Raises:
            LossyConversion: the field that they would ignore.
            UsageError: `num_target_layers` is not known.
        """
        self.refuse_common(config)
        if config.has_reduced_vocab:
            raise LossyConversion(
                f"draft_vocab_size {config.draft_vocab_size} of {config.vocab_size}: a native draft must propose over "
                f"the target's whole vocabulary",
                id="reduced-vocabulary",
                field="draft_vocab_size",
                found=config.draft_vocab_size,
            )
        if config.feature_size != config.hidden_size:
            raise LossyConversion(
                f"target_hidden_size {config.target_hidden_size}: a native draft must be as wide as its target, but "
                f"its hidden_size is {config.hidden_size}",
                id="other-width",
                field="target_hidden_size",
                found=config.target_hidden_size,
            )

    def refuse_common(self, config: DraftConfig) -> None:
        """Refuse a draft that no variant of the native dialect can state.

        Raises:
            LossyConversion: the draft predicts at the anchor, and drafts of this family do not.
            UsageError: `num_target_layers` is not known.
        """
        if config.sample_from_anchor and not self.samples_from_anchor:
            raise cannot_state("sample_from_anchor", True, "the native dialect")
        if config.num_target_layers is None:
            text = "num_target_layers: the native dialect needs it, but the source does not state it"
            raise UsageError(text, id="target-depth-unknown", field="num_target_layers", hint="pass --target TARGET")


def _carried(source: NativeConfig, of_family: set[str]) -> Json:
    own = {*BODY_KEYS, *NESTED_OR_TOP, *of_family, "dflash_config", "draft_vocab_size", "target_hidden_size"}
    top = carried_keys(source.top, own)
    consumed = {*NESTED_OR_TOP, *of_family, *WINDOW_KEYS, "causal", "sample_from_anchor", SINK_KEY, *MODE_KEYS}
    nested = carried_keys(source.nested, consumed, NESTED)
    return {**top, **nested}
