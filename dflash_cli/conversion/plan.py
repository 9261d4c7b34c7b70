"""Decide a conversion before anything is written: the new config, which tensors go along, and what is refused."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.checkpoints.safetensors_writer import WrittenTensor
from dflash_cli.conversion.changes import Change, key_changes
from dflash_cli.conversion.inverse_map import with_inverse
from dflash_cli.conversion.manifest import ConversionFacts
from dflash_cli.conversion.origin import name_of, origin_of_target, without_paths
from dflash_cli.conversion.request import ConversionSpec
from dflash_cli.conversion.result_config import result_config, with_stored_type
from dflash_cli.conversion.side_files import SideFile, choose_side_files, left_behind
from dflash_cli.conversion.tap_order import normalise_taps
from dflash_cli.conversion.tensor_selection import assign_files, drop_tensors, keep_tensors, tensor_changes
from dflash_cli.formats.dialect import Format, Json, get_writable, taps_ascend, writable_formats
from dflash_cli.terminal.environment import redacted
from dflash_cli.version import __version__
from dflash_runtime.checkpoint.pair import DraftSource, TargetSource, check_pair
from dflash_runtime.config import DraftConfig
from dflash_runtime.errors import LossyConversion, UnsupportedError, naming_file
from dflash_runtime.notices import Notice


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionPlan:
    """Everything that will be written, and why. `files` are the weights by file name."""

    draft: DraftCheckpoint
    request: ConversionSpec
    format: Format
    config: DraftConfig
    config_json: Json
    files: Mapping[str, tuple[WrittenTensor, ...]]
    dropped: tuple[Change, ...]
    side_files: tuple[SideFile, ...]
    warnings: tuple[str, ...]

    @property
    def target(self) -> TargetSource | None:
        """The target that was given."""
        return self.request.target

    @property
    def kept(self) -> tuple[WrittenTensor, ...]:
        """The tensors that will be written."""
        return tuple(tensor for tensors in self.files.values() for tensor in tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that will be written."""
        return sum(info.num_bytes for info in self.kept)

    @property
    def key_changes(self) -> list[Change]:
        """What becomes of every key of the source's config."""
        return key_changes(self.draft.checkpoint.config, self.draft.format, self.config_json, self.format)

    @property
    def tensor_changes(self) -> list[Change]:
        """What becomes of every tensor of the source, by its stored name."""
        stored = self.draft.checkpoint.stored_rows
        dropped = [replace(item, from_=stored(item.from_).stored) for item in self.dropped if item.from_ is not None]
        return [*tensor_changes(self.draft, self.kept), *dropped]

    @property
    def file_changes(self) -> list[Change]:
        """What becomes of every file that is neither config nor weights."""
        return [*(item.change for item in self.side_files), *left_behind(self.draft, self.side_files)]

    @property
    def facts(self) -> ConversionFacts:
        """The part of the manifest that is known before anything is written."""
        return ConversionFacts(
            version=__version__,
            source=name_of(self.draft.checkpoint.path),
            target=origin_of_target(self.target),
            argv=tuple(without_paths(redacted(self.request.argv))),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            source_dialect=self.draft.format.name,
            destination_dialect=self.format.name,
            num_bytes=self.num_bytes,
            warnings=self.warnings,
            config=tuple(self.key_changes),
            tensors=tuple(self.tensor_changes),
            files=tuple(self.file_changes),
        )


def plan_conversion(draft: DraftCheckpoint, request: ConversionSpec) -> ConversionPlan:
    """Plan a conversion, or refuse it. Writes nothing.

    Raises:
        TensorMismatch, PairMismatch: the source is malformed, or was not made for the target.
        LossyConversion, UnsupportedError: something would be lost.
        UsageError: no such dialect, or the target has to be named.
    """
    result = get_writable(request.to)
    selection = draft.select_tensors()
    _refuse_doubt(draft, result)
    if request.target is not None:
        check_pair(DraftSource(draft.config, draft.checkpoint), request.target)
    side_files, file_warnings = choose_side_files(draft, result, allow_lossy=request.allow_lossy)
    dropped, tensor_warnings = drop_tensors(
        draft, selection.skip, result, request.target, allow_lossy=request.allow_lossy
    )
    tensors = keep_tensors(draft, dropped)
    config, config_warnings = result_config(draft, request, result, dropped)
    tap_warnings: list[str] = []
    if request.normalise_taps and not taps_ascend(config):
        config, tensors, tap_warnings = normalise_taps(config, tensors, allow_rounding=request.allow_lossy)
    tensors, map_warnings = with_inverse(draft, tensors, result)
    if draft.quantization is None:
        config, type_warnings = with_stored_type(config, tensors)
        config_warnings = [*config_warnings, *type_warnings]
    with naming_file(draft.checkpoint.config_path):
        config, config_json, reader_warnings = _state(config, draft.parsed.carried, result)
    warnings = [*file_warnings, *tensor_warnings, *config_warnings, *tap_warnings, *map_warnings, *reader_warnings]
    return ConversionPlan(
        draft=draft,
        request=request,
        format=result,
        config=config,
        config_json=config_json,
        files=assign_files(tensors, request.max_shard_bytes),
        dropped=tuple(dropped),
        side_files=side_files,
        warnings=(*draft.parsed.notes, *warnings),
    )


def _state(config: DraftConfig, carried: Mapping[str, Any], result: Format) -> tuple[DraftConfig, Json, list[Notice]]:
    """The draft in the new dialect: its canonical config, its JSON, and warnings about readers of that dialect."""
    result.refuse_misread(config)
    result.refuse_style(carried)
    warnings = list(result.warnings(config, carried))
    config, carried = result.adapt(config, carried)
    written = result.write_config(config, carried)
    family = result.read_config(written, Path("config.json")).config.family
    if family != config.family:
        raise LossyConversion(
            f"a draft of the family {config.family}, but {result.title} states drafts of the family {family}",
            id="other-family",
            field="family",
            found=config.family,
            expected=family,
        )
    return config, written, warnings


def _refuse_doubt(draft: DraftCheckpoint, result: Format) -> None:
    """Refuse a source that contradicts itself on causality, or packed weights if the dialect cannot state them."""
    path = draft.checkpoint.config_path
    if draft.parsed.has_doubtful_causality:
        raise UnsupportedError(
            f"{path}: is_causal and dflash_config.causal contradict each other, but the result can state only one",
            hint="--causality causal for a draft of NeMo Automodel's JetSpec recipe, otherwise --causality non-causal",
        )
    if draft.quantization is not None and not result.allows_packed and draft.format.name != result.name:
        allowing = ", ".join(item.name for item in writable_formats() if item.allows_packed)
        raise LossyConversion(
            f"{path}: quantised weights ({draft.quantization}), and {result.title} has no keys for their settings",
            hint=f"to copy them as they are, convert with --to and one of {allowing}",
        )
