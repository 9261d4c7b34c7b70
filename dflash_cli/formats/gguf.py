"""Drafts in a GGUF file, the format of llama.cpp: the config is the metadata, and dotted keys are objects in objects.

llama.cpp taps the input of each layer in `dflash.target_layers`, which is the output of the layer before. One window
and one causality serve all layers, and `sliding_window_pattern` says which layers have the window. Keys under
`dflash_cli` hold the other fields of a draft, so that a conversion to GGUF and back keeps them. llama.cpp ignores them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from dflash_cli.formats.decoder_body import plain_keys, prefixed_keys, read_draft_body
from dflash_cli.formats.dialect import FORMATS, USUAL_KEYS, Format, Json, ParsedConfig, cannot_state, refuse_scales
from dflash_cli.formats.fields import SCALES, Keys, Spelling, look_up, shifted, with_keys
from dflash_cli.formats.gguf_fields import (
    ARCHITECTURE_KEY,
    CARRIED,
    CAUSAL,
    DECODER_NAMES,
    FILE_TYPE,
    FILE_TYPES,
    MASK,
    OWN,
    PATTERN,
    SCALING,
    TAPS,
    TOKENS,
    VALUES,
    WINDOW,
    check_float32,
    check_windows,
    decoder_keys,
    read_carried,
    read_integer,
    read_taps,
    read_windows,
    unread_keys,
    unserved_keys,
    write_rope,
)
from dflash_runtime.checkpoint.stored.gguf import DRAFTS
from dflash_runtime.checkpoint.stored.gguf_checkpoint import gguf_name
from dflash_runtime.checkpoint.targets.required_fields import require_int
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import MISSING, InvalidConfig, LossyConversion
from dflash_runtime.notices import Notice

WRITTEN = "dflash"
"""The architecture that current llama.cpp builds load."""

NORMS = f"{OWN}norms"
"""The element type that vectors had before a conversion widened them to F32."""


@FORMATS.register("gguf")
class Gguf(Format):
    """DFlash drafts of llama.cpp."""

    title: ClassVar[str] = "DFlash, GGUF of llama.cpp"
    priority: ClassVar[int] = 5
    writable: ClassVar[bool] = True
    engine: ClassVar[str | None] = "llama.cpp"
    one_file: ClassVar[str] = "draft.gguf"
    vector_type_key: ClassVar[str] = NORMS
    allows_packed: ClassVar[bool] = False
    containers: ClassVar[tuple[str, ...]] = (
        "general", "dflash", "attention", "rope", "scaling", "tokenizer", "ggml", "dflash_cli", "carried",
        "dflash_config",
    )  # fmt: skip
    own_prefix: ClassVar[str] = "gguf."
    decoder_names: ClassVar[Mapping[str, str]] = DECODER_NAMES
    settings: ClassVar[tuple[str, ...]] = (f"{CARRIED}.dflash_config.", f"{CARRIED}.", "dflash.")
    keys: ClassVar[Keys] = {
        "num_layers": ("dflash.block_count",),
        "hidden_size": ("dflash.embedding_length",),
        "intermediate_size": ("dflash.feed_forward_length",),
        "num_heads": ("dflash.attention.head_count",),
        "num_kv_heads": ("dflash.attention.head_count_kv",),
        "head_dim": ("dflash.attention.key_length", VALUES),
        "rms_norm_eps": ("dflash.attention.layer_norm_rms_epsilon",),
        "max_position_embeddings": ("dflash.context_length",),
        "vocab_size": ("dflash.vocab_size", TOKENS),
        "rope": ("dflash.rope.freq_base", SCALING),
        "windows": (PATTERN, WINDOW),
        "causal": (CAUSAL,),
        "block_size": ("dflash.block_size",),
        "target_layer_ids": (TAPS,),
        "mask_token_id": (MASK,),
        "num_target_layers": (f"{OWN}num_target_layers",),
        "model_type": (f"{OWN}model_type",),
        "dtype": (f"{OWN}dtype",),
        "draft_vocab_size": (f"{OWN}draft_vocab_size",),
        "target_hidden_size": (f"{OWN}target_hidden_size",),
        "has_sinks": (f"{OWN}has_sinks",),
        "hidden_act": (f"{OWN}hidden_act",),
        "attention_bias": (f"{OWN}attention_bias",),
        **{name: (f"{OWN}{name}",) for name in SCALES},
    }
    spellings: ClassVar[Mapping[str, Spelling]] = {"target_layer_ids": shifted(1)}
    unstated: ClassVar[frozenset[str]] = frozenset({"verifier", "target_hidden_size", "has_sinks", *SCALES})

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        found = look_up(config, ARCHITECTURE_KEY)
        return f"{ARCHITECTURE_KEY} is {found!r}" if isinstance(found, str) and found in DRAFTS else None

    def decoder(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The decoder keys under Hugging Face's names, as llama.cpp reads the metadata."""
        return decoder_keys(config)

    def read_config(self, config: Mapping[str, Any], path: Path) -> ParsedConfig:
        """Read the metadata of a draft.

        Raises:
            InvalidConfig: a key is missing or wrong, or the keys of the window contradict each other.
        """
        architecture = look_up(config, ARCHITECTURE_KEY)
        if architecture != WRITTEN:
            raise InvalidConfig(ARCHITECTURE_KEY, architecture, f"{WRITTEN!r}, which llama.cpp loads", path=path)
        body = self.decoder(config)
        check_windows(config, path)
        try:
            fields = read_draft_body(body, path)
            windows = read_windows(body, fields["num_layers"], path)
            vocab_size = require_int(body, "vocab_size", path)
        except InvalidConfig as error:
            raise InvalidConfig(
                self.decoder_key(error.field or ""), error.found, str(error.expected), path=path
            ) from error
        width, of_values = fields["head_dim"], look_up(config, VALUES)
        if of_values not in (MISSING, width):
            raise InvalidConfig(VALUES, of_values, f"{width}, the width of queries and keys", path=path)
        causal = look_up(config, CAUSAL)
        if causal not in (MISSING, True, False):
            raise InvalidConfig(CAUSAL, causal, "true or false", path=path)
        depth = look_up(config, f"{OWN}num_target_layers")
        canonical = DraftConfig(
            **fields,
            vocab_size=vocab_size,
            draft_vocab_size=vocab_size,
            windows=windows,
            causal=(causal is True,) * fields["num_layers"],
            block_size=read_integer(config, "dflash.block_size", path),
            target_layer_ids=read_taps(config, path),
            mask_token_id=read_integer(config, MASK, path),
            num_target_layers=None if depth is MISSING else depth,
            model_type=str(body["model_type"]),
        )
        notes = []
        if causal is MISSING and any(windows):
            text = "causality is not stated: llama.cpp attends to the whole block in every layer"
            notes.append(Notice(text, id="causality-not-stated"))
        return ParsedConfig(
            config=canonical,
            carried={**read_carried(config), **{f"gguf.{key}": look_up(config, key) for key in unread_keys(config)}},
            notes=tuple(notes),
            unserved=self.unserved(config),
        )

    def unserved(self, config: Mapping[str, Any]) -> dict[str, str]:
        return unserved_keys(config)

    def unknown_keys(self, config: Mapping[str, Any], carried: Mapping[str, Any]) -> list[str]:
        """The carried keys without usual keys of Hugging Face's configs. Unknown keys of the rope are carried, too."""
        return sorted(carried.keys() - USUAL_KEYS)

    def name_in_file(self, tensor: str) -> str:
        return gguf_name(tensor)

    def stored_key(self, carried: str) -> str:
        return carried.removeprefix(self.own_prefix) if carried.startswith(self.own_prefix) else f"{CARRIED}.{carried}"

    def write_config(self, config: DraftConfig, carried: Mapping[str, Any]) -> Json:
        """Write the metadata of a draft, without the tokenizer of its target.

        Raises:
            LossyConversion: llama.cpp cannot compute the draft, or GGUF cannot hold a number.
        """
        self._refuse_to_write(config)
        rope = write_rope(config.rope, self.title)
        sizes = sorted({window for window in config.windows if window is not None})
        pattern = [window is not None for window in config.windows]
        own = {"num_target_layers": config.num_target_layers, "model_type": config.model_type, "dtype": config.dtype}
        kept = {**plain_keys(carried), **_nested_native(carried)}
        return with_keys(
            {},
            {
                ARCHITECTURE_KEY: WRITTEN,
                "general.type": "model",
                "general.quantization_version": 2,
                **({FILE_TYPE: FILE_TYPES[config.dtype]} if config.dtype in FILE_TYPES else {}),
                "dflash.block_count": config.num_layers,
                "dflash.context_length": config.max_position_embeddings,
                "dflash.embedding_length": config.hidden_size,
                "dflash.feed_forward_length": config.intermediate_size,
                "dflash.vocab_size": config.vocab_size,
                "dflash.attention.head_count": config.num_heads,
                "dflash.attention.head_count_kv": config.num_kv_heads,
                "dflash.attention.key_length": config.head_dim,
                "dflash.attention.value_length": config.head_dim,
                "dflash.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
                CAUSAL: config.is_causal,
                **({WINDOW: sizes[0], PATTERN: pattern} if sizes else {}),
                "dflash.rope.freq_base": float(config.rope.theta),
                **{f"{SCALING}.{name}": value for name, value in rope.items()},
                "dflash.block_size": config.block_size,
                TAPS: [tap + 1 for tap in config.target_layer_ids],
                MASK: config.mask_token_id,
                **{f"{OWN}{name}": value for name, value in own.items() if value is not None},
                **({CARRIED: kept} if kept else {}),
            },
        )

    def _refuse_to_write(self, config: DraftConfig) -> None:
        """Refuse a draft that llama.cpp would compute in another way.

        Raises:
            LossyConversion: the field.
        """
        refuse_scales(config, "llama.cpp")
        for field, usual in (("attention_bias", False), ("has_sinks", False), ("hidden_act", "silu")):
            if getattr(config, field) != usual:
                raise cannot_state(field, getattr(config, field), self.title)
        if config.sample_from_anchor:
            raise cannot_state("sample_from_anchor", True, self.title)
        for field, found, expected in (
            ("draft_vocab_size", config.draft_vocab_size, config.vocab_size),
            ("target_hidden_size", config.feature_size, config.hidden_size),
        ):
            if found != expected:
                id = "reduced-vocabulary" if field == "draft_vocab_size" else "other-width"
                text = f"{field} {found}: {self.title} needs {expected}"
                raise LossyConversion(text, id=id, field=field, found=found)
        sizes = sorted({window for window in config.windows if window is not None})
        if len(sizes) > 1:
            text = f"windows of sizes {sizes}: llama.cpp has one window for all layers"
            raise LossyConversion(text, id="several-windows", field="sliding_window", found=sizes)
        if config.is_causal is None:
            text = f"causality {list(config.causal)} by layer: llama.cpp has one causality for all layers"
            hint = "--causality causal or --causality non-causal, if the draft was trained so"
            raise LossyConversion(text, id="several-causalities", field=CAUSAL, found=list(config.causal), hint=hint)
        for key, value in (("rms_norm_eps", config.rms_norm_eps), ("rope_theta", config.rope.theta)):
            check_float32(key, value)

    def warnings(self, config: DraftConfig, carried: Mapping[str, Any]) -> Iterator[Notice]:
        if config.num_target_layers is not None and config.num_target_layers - 1 in config.target_layer_ids:
            yield from super().warnings(config, carried)


def _nested_native(carried: Mapping[str, Any]) -> Json:
    nested = prefixed_keys(carried, "dflash_config.")
    return {"dflash_config": nested} if nested else {}
