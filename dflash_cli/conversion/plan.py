"""Plan a conversion before anything is written: the new config, the copied tensors and files, and all refusals."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.conversion.changes import Change, key_changes, lost_keys
from dflash_cli.conversion.fp8_tensors import cut_blocks, in_fp8, quantization_config
from dflash_cli.conversion.inverse_map import with_inverse
from dflash_cli.conversion.result_config import kept_keys, result_config, with_stored_type
from dflash_cli.conversion.result_plan import ResultPlan
from dflash_cli.conversion.side_files import ALLOW_HINT, choose_side_files
from dflash_cli.conversion.spec import ConversionSpec
from dflash_cli.conversion.tap_order import normalise_taps
from dflash_cli.conversion.tensor_selection import assign_files, drop_tensors, keep_tensors, tensor_changes
from dflash_cli.conversion.unpacked_tensors import with_unpacked
from dflash_cli.conversion.vector_types import with_vector_types
from dflash_cli.formats.dialect import (
    Format,
    Json,
    get_writable,
    taps_ascend,
    word_of,
    writable_formats,
    writable_words,
)
from dflash_cli.formats.fields import REMOVED, with_keys
from dflash_runtime.checkpoint.pair import DraftSource, check_pair
from dflash_runtime.checkpoint.quantised.fp8_format import read_fp8_format
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import LossyConversion, UnsupportedError, naming_file
from dflash_runtime.notices import Notice


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionPlan(ResultPlan):
    """The plan of a draft in another dialect."""

    draft: DraftCheckpoint
    config: DraftConfig
    dropped: tuple[Change, ...]

    @property
    def key_changes(self) -> list[Change]:
        source, dialect = self.draft.checkpoint.config, self.draft.format
        changes = key_changes(source, dialect, self.config_json, self.format)
        listed = {change.from_ for change in changes}
        unread = dialect.unread(source).keys() - self.format.unread(self.config_json).keys() - listed
        lost = {key: f"{self.format.title} has no key for it" for key in sorted(unread)}
        for key in sorted(self.draft.checkpoint.metadata.keys() - {"format"}):
            lost[f"__metadata__.{key}"] = "metadata of the headers, which no reader uses"
        dropped = [Change(key, None, "dropped", why) for key, why in lost.items()]
        return [*changes, *dropped]

    @property
    def tensor_changes(self) -> list[Change]:
        name_in_file = self.draft.checkpoint.name_in_file
        dropped = [replace(item, from_=name_in_file(item.from_)) for item in self.dropped if item.from_ is not None]
        return [*tensor_changes(self.draft, self.kept, self.format), *dropped]


def plan_conversion(draft: DraftCheckpoint, spec: ConversionSpec) -> ConversionPlan:
    """Plan a conversion, or refuse it. Writes nothing.

    Raises:
        TensorMismatch, PairMismatch: the source is malformed, or was not made for the target.
        LossyConversion, UnsupportedError: the result would lose a part of the draft.
        UsageError: no such dialect, or the dialect needs the target or its name.
    """
    result = get_writable(spec.to, draft.config.family)
    selection = draft.select_tensors()
    _refuse_source(draft, result)
    if spec.target is not None:
        check_pair(DraftSource(draft.config, draft.checkpoint), spec.target)
    side_files, file_warnings = choose_side_files(draft, result, allow_lossy=spec.allow_lossy)
    dropped, tensor_warnings = drop_tensors(draft, selection.skip, result, spec.target, allow_lossy=spec.allow_lossy)
    tensors = with_unpacked(draft, keep_tensors(draft, dropped))
    config, config_warnings = result_config(draft, spec, result, dropped)
    tap_warnings: list[Notice] = []
    if spec.normalise_taps and not taps_ascend(config):
        config, tensors, tap_warnings = normalise_taps(config, tensors, allow_rounding=spec.allow_lossy)
    tensors, map_warnings = with_inverse(draft, tensors, result, keeps_stored=spec.is_repair)
    carried = kept_keys(draft, spec, result)
    if spec.quantize is not None:
        _refuse_unquantisable(result)
        carried["quantization_config"] = quantization_config(has_all=spec.quantizes_all, has_fc=result.packs_fc)
    if draft.quantization is None:
        config, type_warnings = with_stored_type(config, tensors)
        config_warnings = [*config_warnings, *type_warnings]
    with naming_file(draft.checkpoint.config_path):
        config, config_json, reader_warnings = _state(config, carried, result)
    if spec.quantize is not None:
        tensors = in_fp8(draft, tensors, spec.target, has_all=spec.quantizes_all, has_fc=result.packs_fc)
        reader_warnings += cut_blocks(config, has_all=spec.quantizes_all)
    tensors, config_json = with_vector_types(draft, tensors, config_json, result)
    if spec.is_repair:
        config_json = _without_causality(draft, config, config_json, result)
    if word_of(draft.format) == word_of(result):
        config_json = result.with_unread(config_json, draft.checkpoint.config)
    reader_warnings += _lost_keys(draft, config_json, result, allow_lossy=spec.allow_lossy)
    spec, tokenizer_warnings = _with_tokenizer(spec, draft, result)
    warnings = [*file_warnings, *tensor_warnings, *config_warnings, *tap_warnings, *map_warnings]
    return ConversionPlan(
        draft=draft,
        spec=spec,
        format=result,
        config=config,
        config_json=config_json,
        files={result.one_file: tuple(tensors)} if result.one_file else assign_files(tensors, spec.max_shard_bytes),
        dropped=tuple(dropped),
        side_files=side_files,
        warnings=(*draft.parsed.notes, *warnings, *reader_warnings, *tokenizer_warnings),
    )


def _with_tokenizer(
    spec: ConversionSpec, draft: DraftCheckpoint, result: Format
) -> tuple[ConversionSpec, tuple[Notice, ...]]:
    """The spec with the tokenizer of a source that is one file, and a warning if a result of one file lacks any."""
    if not result.one_file or spec.tokenizer is not None:
        return spec, ()
    if draft.format.one_file:
        return replace(spec, tokenizer=draft.checkpoint.config_path), ()
    text = "the result lacks a tokenizer, and its readers need one: --tokenizer copies the target's"
    return spec, (Notice(text, id="no-tokenizer"),)


def _refuse_unquantisable(result: Format) -> None:
    """Refuse a dialect without a key for quantization."""
    if not result.allows_packed:
        text = f"--quantize: {result.title} lacks keys for quantised weights"
        raise UnsupportedError(
            text, id="dialect-not-quantised", field="--to", found=result.name, hint="leave --quantize out"
        )


def _state(config: DraftConfig, carried: Mapping[str, Any], result: Format) -> tuple[DraftConfig, Json, list[Notice]]:
    """The canonical config and the JSON of the draft in the new dialect, and warnings about readers of the dialect."""
    result.refuse_misread(config)
    result.refuse_style(carried)
    warnings = list(result.warnings(config, carried))
    config, carried = result.adapt(config, carried)
    return config, result.write_config(config, carried), warnings


def _without_causality(draft: DraftCheckpoint, config: DraftConfig, config_json: Json, result: Format) -> Json:
    """The JSON without the keys of causality if the source does not state it: only its trainer can.

    Raises:
        UnsupportedError: readers of the result would take another causality.
    """
    if draft.stated.states_causality:
        return config_json
    path = draft.checkpoint.config_path
    unstated = with_keys(config_json, dict.fromkeys(result.keys_of("causal"), REMOVED))
    if result.read_config(unstated, path).config.causal != config.causal:
        text = f"causality is not stated, and {result.title} would take another one than {draft.format.title}"
        hint = "convert with --causality causal or --causality non-causal"
        raise UnsupportedError(text, id="causality-not-stated", path=path, field="causal", hint=hint)
    return unstated


def _lost_keys(draft: DraftCheckpoint, config_json: Json, result: Format, *, allow_lossy: bool) -> list[Notice]:
    """A warning about keys of unknown meaning that the result cannot state, or the refusal to leave them out."""
    changes = key_changes(draft.checkpoint.config, draft.format, config_json, result)
    lost = lost_keys(changes, draft.parsed.carried, draft.format)
    for key in draft.format.unread(draft.checkpoint.config).keys() - result.unread(config_json).keys() - {*lost}:
        lost += [] if key.rpartition(".")[2] in draft.format.ignored_settings else [key]
    lost.sort()
    if not lost:
        return []
    text = f"{', '.join(lost)}: {result.title} lacks a key for it"
    if not allow_lossy:
        raise LossyConversion(
            text, id="keys-lost", path=draft.checkpoint.config_path, field=lost[0], found=tuple(lost), hint=ALLOW_HINT
        )
    return [Notice(f"{text}, and it is left out", id="keys-lost")]


def _refuse_source(draft: DraftCheckpoint, result: Format) -> None:
    """Refuse another draft family, contradictory causality, and quantised weights that the dialect cannot state."""
    path, family = draft.checkpoint.config_path, draft.config.family
    if family != result.family:
        holding = writable_words(family)
        raise LossyConversion(
            f"a draft of the family {family!r}, but {result.title} holds drafts of the family {result.family!r}",
            id="other-family",
            path=path,
            field="family",
            found=family,
            expected=result.family,
            hint=f"convert with --to {' or '.join(holding)}" if holding else None,
        )
    draft.refuse_unknown_layout()
    if draft.parsed.has_doubtful_causality:
        raise UnsupportedError(
            "is_causal and dflash_config.causal contradict each other, but the result can state only one",
            id="causality-contradicts",
            path=path,
            field="is_causal",
            hint="--causality causal for a draft of NeMo Automodel's JetSpec recipe, otherwise --causality non-causal",
        )
    if draft.quantization is not None and draft.format.one_file and not result.one_file:
        raise LossyConversion(
            f"quantised weights ({draft.quantization}), which only {draft.format.title} holds",
            id="quantised-weights",
            path=path,
            found=draft.quantization,
            hint="--dequantize writes them as bfloat16",
        )
    if draft.quantization is not None and not result.allows_packed and word_of(draft.format) != word_of(result):
        is_fp8 = read_fp8_format(draft.checkpoint) is not None
        unpacking = "--dequantize writes them as bfloat16; " if is_fp8 else ""
        allowing = ", ".join(word_of(item) for item in writable_formats(family) if item.allows_packed)
        raise LossyConversion(
            f"quantised weights ({draft.quantization}), but {result.title} lacks keys for their settings",
            id="quantised-weights",
            path=path,
            found=draft.quantization,
            hint=f"{unpacking}to copy them as they are, convert with --to and one of {allowing}",
        )
