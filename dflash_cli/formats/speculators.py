"""The speculators dialect (vllm-project/speculators 0.5 to 0.9): the decoder is inside `transformer_layer_config`.

Tapped layers are numbered from 1 (`aux_hidden_state_layer_ids` = layer + 1). The top level has no `model_type`. The
weights may include a reduced head with its id map, or copies of the target's embedding and head.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
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
from dflash_cli.formats.dialect import (
    FORMATS,
    Format,
    Json,
    ParsedConfig,
    cannot_state,
    named_architectures,
    refuse_scales,
)
from dflash_cli.formats.fields import AUX_KEY, ZLAB_SCALES, Keys, Spelling, look_up, shifted
from dflash_cli.formats.speculators_updaters import (
    NON_CAUSAL_FLAG,
    SPECULATORS,
    find_updater,
    layer_causality,
    register_speculator,
    update_dflash,
)
from dflash_cli.formats.unserved import find_unserved, naming_unserved
from dflash_runtime.checkpoint.targets.hf_config import read_layer_types, read_windows
from dflash_runtime.checkpoint.targets.required_fields import require_int
from dflash_runtime.draft_config import DraftConfig, Verifier
from dflash_runtime.errors import MISSING, InvalidConfig, LossyConversion, UsageError
from dflash_runtime.json_values import as_object
from dflash_runtime.notices import Notice

__all__ = ["SPECULATORS", "SpeculatorsFormat", "register_speculator", "update_dflash"]

BODY = "transformer_layer_config."
TOP = "speculators."
"""Prefix of carried keys from the top level of a speculators config."""

WRITTEN_VERSION = "0.9.0"
"""The release of speculators that `write_config` follows."""

PROPOSAL: Json = {"proposal_type": "greedy", "verifier_accept_k": 1, "accept_tolerance": 0.0}
"""The settings of a proposal, beside its number of draft tokens. No engine reads them."""

SAME_KEYS = ("mask_token_id", "block_size", "draft_vocab_size", "target_hidden_size", "num_target_layers")
"""Fields whose key has the same name."""

TOP_KEYS = frozenset(
    {
        *SAME_KEYS, "speculators_model_type", "speculators_version", "speculators_config", "transformer_layer_config",
        "aux_hidden_state_layer_ids", NON_CAUSAL_FLAG, "sample_from_anchor", "tie_word_embeddings", "dtype",
        "torch_dtype", "model_type",
    }
)  # fmt: skip


PROPOSAL_KEYS = ("algorithm", "default_proposal_method", "proposal_methods", "verifier")
PROPOSAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "proposal_type": ("greedy",),
    "verifier_accept_k": (1,),
    "accept_tolerance": (0,),
}
"""Key of a proposal method -> the values that change nothing."""


@FORMATS.register("speculators")
class SpeculatorsFormat(Format):
    """speculators checkpoints."""

    title: ClassVar[str] = "DFlash, speculators dialect"
    priority: ClassVar[int] = 50
    writable: ClassVar[bool] = True
    keeps_head: ClassVar[bool] = True
    sorts_taps: ClassVar[bool] = True
    allows_packed: ClassVar[bool] = False
    derives_inverse: ClassVar[bool] = True
    ignored_settings: ClassVar[frozenset[str]] = frozenset(PROPOSAL)
    signs: ClassVar[tuple[str, ...]] = ("speculators_config", "speculators_model_type")
    kind: ClassVar[tuple[str, str] | None] = ("speculators_model_type", "dflash")
    containers: ClassVar[tuple[str, ...]] = ("transformer_layer_config", "dflash_config", "speculators_config")
    own_prefix: ClassVar[str] = TOP
    body: ClassVar[str] = BODY
    spellings: ClassVar[Mapping[str, Spelling]] = {"target_layer_ids": shifted(1)}
    keys: ClassVar[Keys] = {
        **{field: tuple(BODY + key for key in keys) for field, keys in BODY_FIELDS.items()},
        "dtype": (BODY + "dtype", BODY + "torch_dtype", "dtype", "torch_dtype"),
        AUX_KEY: (BODY + AUX_KEY, AUX_KEY),
        "quantization_config": ("quantization_config", f"{BODY}quantization_config"),
        "target_layer_ids": ("aux_hidden_state_layer_ids",),
        **{key: (key,) for key in SAME_KEYS},
        "num_draft_tokens": ("speculators_config.proposal_methods",),
        "causal": (NON_CAUSAL_FLAG,),
        "sample_from_anchor": ("sample_from_anchor", f"{BODY}{NESTED}sample_from_anchor"),
        "verifier": ("speculators_config.verifier",),
        "verifier_name": ("speculators_config.verifier.name_or_path",),
        "verifier_architectures": ("speculators_config.verifier.architectures",),
    }
    unstated: ClassVar[frozenset[str]] = frozenset({*ZLAB_SCALES, "has_sinks"})

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        if "speculators_model_type" in config:
            return f"speculators_model_type is {config['speculators_model_type']!r}"
        return "config.json has speculators_config" if "speculators_config" in config else None

    def read_config(self, config: Mapping[str, Any], path: Path) -> ParsedConfig:
        """Read the config through the updater of its type, so that dflash and an engine see the same draft.

        Raises:
            InvalidConfig: a key is missing or wrong.
            UnknownFormat: the draft is of another speculators type than DFlash.
            UnsupportedError: the draft taps the embedding; see also `naming_unserved`.
        """
        kind = config.get("speculators_model_type", MISSING)
        if kind is MISSING:
            raise InvalidConfig("speculators_model_type", MISSING, "'dflash'", path=path)
        update = find_updater(kind)
        body = require_object(config.get("transformer_layer_config", MISSING), "transformer_layer_config", path)
        seen = copy.deepcopy(dict(body))
        update(config, seen)

        def stated(field: str) -> Any:
            found = (look_up(config, key) for key in self.keys_of(field))
            return next((value for value in found if value is not MISSING), MISSING)

        unserved = self.unserved(config)
        with naming_unserved(unserved):
            own = {"family": self.family, **self.read_family(stated)}
            canonical = _canonical(config, body, seen, path, own)
        own_keys = {key.removeprefix(BODY) for field in self.family_fields for key in self.keys[field]}
        carried, notes = _carried(config, body, own_keys), _notes(config, body, canonical)
        is_unknown = self.has_unknown_layout(stated)
        return ParsedConfig(
            config=canonical, carried=carried, notes=notes, unserved=unserved, has_unknown_layout=is_unknown
        )

    def causality(self, config: Mapping[str, Any], layer_types: Sequence[str]) -> dict[str, tuple[bool, ...] | None]:
        """If the flag is absent, every layer is non-causal. vLLM prefers the decoder's own is_causal."""
        stated = as_object(config.get("transformer_layer_config")).get("is_causal")
        body = (stated,) * len(layer_types) if isinstance(stated, bool) else None
        found = {} if stated is None else {f"{BODY}is_causal": body}
        return {**found, NON_CAUSAL_FLAG: layer_causality(config, layer_types)}

    def unserved(self, config: Mapping[str, Any]) -> dict[str, str]:
        body = as_object(config.get("transformer_layer_config"))
        return find_unserved(config, body, as_object(body.get("dflash_config")))

    def stored_key(self, carried: str) -> str:
        is_outer = carried.startswith((TOP, "speculators_config."))
        return carried.removeprefix(TOP) if is_outer else BODY + carried

    def unread(self, config: Mapping[str, Any]) -> Json:
        """The keys of speculators_config beyond the ones that 0.9 writes, and settings of proposals with an effect."""
        outer = as_object(config.get("speculators_config"))
        methods = outer.get("proposal_methods")
        found = {f"speculators_config.{key}": value for key, value in outer.items() if key not in PROPOSAL_KEYS}
        for index, method in enumerate(methods if isinstance(methods, list) else ()):
            for key, value in as_object(method).items():
                is_plain = value is None or value in PROPOSAL_VALUES.get(key, ())
                if key != "speculative_tokens" and not is_plain:
                    found[f"speculators_config.proposal_methods[{index}].{key}"] = value
        for key, value in as_object(outer.get("verifier")).items():
            if key not in ("name_or_path", "architectures"):
                found[f"speculators_config.verifier.{key}"] = value
        return found

    def with_unread(self, written: Json, source: Mapping[str, Any]) -> Json:
        """The written config with every key of the source's speculators_config that 0.9 does not write."""
        outer, old = dict(written["speculators_config"]), as_object(source.get("speculators_config"))
        outer |= {key: value for key, value in old.items() if key not in PROPOSAL_KEYS}
        outer["verifier"] = {**as_object(old.get("verifier")), **outer["verifier"]}
        methods = old.get("proposal_methods")
        first = as_object(methods[0]) if isinstance(methods, list) and methods else {}
        outer["proposal_methods"] = [{**first, **outer["proposal_methods"][0]}]
        return {**written, "speculators_config": outer}

    def write_config(self, config: DraftConfig, carried: Mapping[str, Any]) -> Json:
        """Write the keys of speculators 0.9, with every default.

        Raises:
            LossyConversion: the dialect cannot state the draft's causality, scales or attention sinks.
            UsageError: the target's name is not known.
        """
        refuse_scales(config, "the speculators dialect", ZLAB_SCALES)
        if config.has_sinks:
            raise cannot_state("has_sinks", True, "the speculators dialect")
        if config.verifier is None:
            raise UsageError(
                "verifier: a speculators checkpoint must name its target",
                id="verifier-unknown",
                field="verifier",
                hint="pass --target-name NAME or --target TARGET",
            )
        body = {"max_window_layers": config.num_layers, **plain_keys(carried), **write_body(config)}
        nested = prefixed_keys(carried, NESTED)
        if nested:
            body["dflash_config"] = nested
        return {
            **prefixed_keys(carried, TOP),
            "architectures": [self.written_as],
            "speculators_model_type": config.family,
            "speculators_version": WRITTEN_VERSION,
            "speculators_config": _write_proposal(config),
            "transformer_layer_config": body,
            "draft_vocab_size": config.draft_vocab_size,
            "block_size": config.block_size,
            "target_hidden_size": config.target_hidden_size,
            "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
            "mask_token_id": config.mask_token_id,
            NON_CAUSAL_FLAG: _write_causality(config),
            "sample_from_anchor": config.sample_from_anchor,
            "tie_word_embeddings": False,
            **self.write_family(config),
            **({} if config.num_target_layers is None else {"num_target_layers": config.num_target_layers}),
            **({} if config.dtype is None else {"dtype": config.dtype}),
        }

    def warnings(self, config: DraftConfig, carried: Mapping[str, Any]) -> Iterator[Notice]:
        yield from super().warnings(config, carried)
        if config.is_causal is None:
            yield Notice(
                "sliding layers are causal and full layers are not: speculators reads the result this way, but vLLM "
                "0.33 makes every layer causal; for vLLM, convert with --to vllm",
                id="causality-differs",
            )


def _canonical(
    config: Mapping[str, Any], body: Mapping[str, Any], seen: Mapping[str, Any], path: Path, own: Json
) -> DraftConfig:
    """The draft as an engine sees it (`seen`), with the fields that only its family has (`own`)."""
    fields = read_draft_body(body, path)
    fields["dtype"] = fields["dtype"] or config.get("dtype") or config.get("torch_dtype")
    depth = config.get("num_target_layers")
    return DraftConfig(
        **fields,
        vocab_size=require_int(body, "vocab_size", path),
        draft_vocab_size=require_int(config, "draft_vocab_size", path),
        block_size=require_int(config, "block_size", path),
        target_layer_ids=tuple(aux_id - 1 for aux_id in seen[AUX_KEY]),
        mask_token_id=config["mask_token_id"],
        target_hidden_size=seen.get("target_hidden_size"),
        num_target_layers=None if depth is None else require_int(config, "num_target_layers", path),
        windows=read_windows(body, fields["num_layers"], path),
        causal=layer_causality(config, read_layer_types(body, fields["num_layers"], path)),
        verifier=_read_verifier(config, path),
        model_type=str(body.get("model_type", "qwen3")),
        **own,
    )


def _read_verifier(config: Mapping[str, Any], path: Path) -> Verifier | None:
    outer = require_object(config.get("speculators_config", {}), "speculators_config", path)
    verifier = require_object(outer.get("verifier") or {}, "speculators_config.verifier", path)
    name = verifier.get("name_or_path")
    if not name:
        return None
    return Verifier(name_or_path=str(name), architectures=tuple(named_architectures(verifier)))


def _carried(config: Mapping[str, Any], body: Mapping[str, Any], own_keys: set[str]) -> Json:
    nested = body.get("dflash_config")
    return {
        **carried_keys(config, TOP_KEYS | own_keys, TOP),
        **carried_keys(body, {*BODY_KEYS, "dflash_config", *own_keys}),
        **(carried_keys(nested, (), NESTED) if isinstance(nested, dict) else {}),
    }


def _notes(config: Mapping[str, Any], body: Mapping[str, Any], canonical: DraftConfig) -> tuple[Notice, ...]:
    notes = partial_rope_notes(body)
    stated = body.get("is_causal")
    if stated is not None and stated != canonical.is_causal:
        text = f"transformer_layer_config.is_causal {stated} is ignored, because {NON_CAUSAL_FLAG} decides"
        notes.append(Notice(text, id="causality-contradicts"))
    first, ignored = _proposal(as_object(config.get("speculators_config")))
    asked = first.get("speculative_tokens", canonical.num_draft_tokens)
    if asked != canonical.num_draft_tokens:
        text = f"speculative_tokens is {asked!r}; a conversion writes {canonical.num_draft_tokens}, the block minus one"
        notes.append(Notice(text, id="draft-tokens-differ"))
    if ignored:
        text = f"{', '.join(ignored)}: engines ignore it, and a conversion leaves it out"
        notes.append(Notice(text, id="proposal-settings-ignored"))
    if NON_CAUSAL_FLAG not in config and any(window is not None for window in canonical.windows):
        text = f"{NON_CAUSAL_FLAG} is not stated: every layer is read as non-causal"
        notes.append(Notice(text, id="causality-not-stated"))
    return tuple(notes)


def _write_causality(config: DraftConfig) -> bool:
    """The value of `sliding_window_non_causal`: true if no layer slides, because vLLM 0.33 applies false to all layers.

    Raises:
        LossyConversion: a full layer is causal, or sliding layers differ.
    """
    sliding = {causal for causal, window in zip(config.causal, config.windows, strict=True) if window is not None}
    full = {causal for causal, window in zip(config.causal, config.windows, strict=True) if window is None}
    if True in full:
        raise LossyConversion(
            "causal full-attention layers: in the speculators dialect full layers are never causal",
            id="causal-full-layers",
            field="causal",
        )
    if len(sliding) > 1:
        raise LossyConversion(
            "sliding layers differ in causality, but the speculators dialect has one flag for all of them",
            id="several-causalities",
            field="causal",
        )
    return sliding != {True}


def _proposal(stated: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """The proposal that engines read, and the settings of proposals that `write_config` does not write."""
    methods = stated.get("proposal_methods")
    first, *others = methods if isinstance(methods, list) and methods else [{}]
    proposal = as_object(first)
    ignored = [f"{key} {proposal[key]!r}" for key, value in PROPOSAL.items() if proposal.get(key, value) != value]
    return proposal, ignored + ([f"{len(others)} further proposal_methods"] if others else [])


def _write_proposal(config: DraftConfig) -> Json:
    verifier = config.verifier
    assert verifier is not None
    return {
        "algorithm": config.family,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {**PROPOSAL, "speculative_tokens": config.num_draft_tokens},
        ],
        "verifier": {"name_or_path": verifier.name_or_path, "architectures": list(verifier.architectures)},
    }
