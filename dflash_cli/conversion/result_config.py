"""Derive the canonical config of a conversion's result from the source's config."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dflash_cli.checkpoints.checkpoint_identity import published_name
from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.checkpoints.safetensors_writer import WrittenTensor
from dflash_cli.conversion.changes import Change
from dflash_cli.conversion.spec import ConversionSpec
from dflash_cli.formats.decoder_body import STORED_AS
from dflash_cli.formats.dialect import Format, Json, named_architectures
from dflash_cli.formats.fields import SCALES
from dflash_runtime.checkpoint.layout import EMBEDDING, HEAD
from dflash_runtime.draft_config import DraftConfig, Verifier
from dflash_runtime.notices import Notice


def result_config(
    draft: DraftCheckpoint, spec: ConversionSpec, result: Format, dropped: Sequence[Change]
) -> tuple[DraftConfig, list[Notice]]:
    """The canonical config of the result, and warnings for the user."""
    config = draft.config
    warnings: list[Notice] = []
    if spec.target is not None and config.num_target_layers is None:
        config = replace(config, num_target_layers=spec.target.facts.num_layers)
    if any(change.from_ == HEAD for change in dropped):
        config = replace(config, draft_vocab_size=config.vocab_size)
    if "verifier" in result.unstated:
        config = replace(config, verifier=None)
    else:
        verifier, warnings = _verifier(config, spec)
        config = replace(config, verifier=verifier)
    if "target_hidden_size" in result.unstated and config.feature_size == config.hidden_size:
        config = replace(config, target_hidden_size=None)
    config = _with_target_scale(config, spec, result)
    if spec.allow_lossy:
        config, lost = _without_scales(config, result)
        warnings += lost
    return config, warnings


def kept_keys(draft: DraftCheckpoint, spec: ConversionSpec, result: Format) -> Json:
    """The keys that the result carries: the source's, and an embedding scale of 1 that readers would else replace.

    Readers of some dialects feed a draft without a stated scale with the target's scale.
    """
    config, carried = draft.config, dict(draft.parsed.carried)
    is_read_anew = result.takes_target_scale and not config.has_target_scale and config.input_embedding_scale == 1
    if is_read_anew and _target_scale(spec) != 1:
        carried[result.new_key("input_embedding_scale")] = 1.0
    return carried


def _with_target_scale(config: DraftConfig, spec: ConversionSpec, result: Format) -> DraftConfig:
    """The config with the target's embedding scale as its own, if readers of the result do not apply it unasked."""
    if not config.has_target_scale or result.takes_target_scale:
        return config
    return replace(config, input_embedding_scale=_target_scale(spec), has_target_scale=False)


def _target_scale(spec: ConversionSpec) -> float:
    return 1.0 if spec.target is None else spec.target.facts.embedding_scale


def with_stored_type(config: DraftConfig, tensors: Iterable[WrittenTensor]) -> tuple[DraftConfig, list[Notice]]:
    """The config with the element type of the draft's own tensors, if they share one; and a warning if it changes."""
    borrowed = {HEAD, EMBEDDING}
    names = {stored: name for name, stored in STORED_AS.items()}
    kinds = {item.dtype for item in tensors if item.name not in borrowed and item.dtype in names}
    if config.dtype not in STORED_AS or len(kinds) != 1 or STORED_AS[config.dtype] in kinds:
        return config, []
    actual = names[kinds.pop()]
    text = f"dtype: the source states {config.dtype}; the result states {actual}, the type of the weights"
    return replace(config, dtype=actual), [Notice(text, id="dtype-corrected")]


def _verifier(config: DraftConfig, spec: ConversionSpec) -> tuple[Verifier | None, list[Notice]]:
    """The target as the result names it, and warnings.

    The name is --target-name, else the name in the source, else the hub id, else the local directory's name.
    """
    target = spec.target
    architectures = tuple(named_architectures(target.checkpoint.config)) if target is not None else ()
    carried = config.verifier
    if carried is not None and (not architectures or (spec.is_repair and carried.architectures)):
        architectures = carried.architectures
    name = spec.verifier
    if name is None and carried is not None:
        name = carried.name_or_path
    if name is not None:
        return Verifier(name_or_path=name, architectures=architectures), []
    if target is None or spec.target_reference is None:
        return None, []
    name, warnings = _target_name(spec.target_reference, target.checkpoint.path.resolve().name)
    return Verifier(name_or_path=name, architectures=architectures), warnings


def _target_name(reference: str, directory: str) -> tuple[str, list[Notice]]:
    """The published name of a referenced target, else the name of its directory and a warning."""
    if (name := published_name(reference)) is not None:
        return name, []
    text = f"the target is stored as {directory!r}, the name of its directory; vLLM needs --target-name ORG/REPO"
    return directory, [Notice(text, id="target-named-by-directory")]


def _without_scales(config: DraftConfig, result: Format) -> tuple[DraftConfig, list[Notice]]:
    """The config without the scales that the dialect cannot state, and a warning that names them."""
    off: Json = {key: value for key, value in SCALES.items() if key in result.unstated}
    lost = [key for key, value in off.items() if getattr(config, key) != value]
    if not lost:
        return config, []
    text = f"scales are left out ({', '.join(lost)}), so the converted draft computes other values"
    return replace(config, **off), [Notice(text, id="scales-dropped")]
