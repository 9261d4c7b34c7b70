"""Decide a conversion before anything is written: the new config, which tensors go along, and what is refused."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.checkpoints.references import TINY, TINY_TARGET_NAME, is_hub_id
from dflash_cli.checkpoints.safetensors_writer import WrittenTensor
from dflash_cli.conversion.changes import Fate, key_fates
from dflash_cli.conversion.engine_fit import check_serving, serving_warnings, suit_carried, suit_engine
from dflash_cli.conversion.side_files import Companion, find_companions, find_mask, left_behind
from dflash_cli.conversion.tap_order import PROJECTION, is_normal, normalise_taps
from dflash_cli.conversion.tensor_selection import assign_files, dropped_tensors, tensor_fates
from dflash_cli.formats.dialect import Format, Json, get_format, named_architectures
from dflash_runtime.checkpoint.files import TensorInfo
from dflash_runtime.checkpoint.layout import HEAD
from dflash_runtime.checkpoint.layout import PACKED_DTYPES as PACKED
from dflash_runtime.checkpoint.pair import DraftSource, TargetSource, check_pair
from dflash_runtime.config import DraftConfig, Verifier
from dflash_runtime.errors import LossyConversion, UnsupportedError, naming_file

SCALES_OFF = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user asked for. `target_reference` is the target as it was typed."""

    to: str
    target: TargetSource | None = None
    target_reference: str | None = None
    verifier: str | None = None
    allow_lossy: bool = False
    normalise_taps: bool = False
    max_shard_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that will be written, and why. `files` are the weights by file name."""

    draft: DraftCheckpoint
    target: TargetSource | None
    format: Format
    config: DraftConfig
    config_json: Json
    files: Mapping[str, tuple[WrittenTensor, ...]]
    dropped: tuple[Fate, ...]
    companions: tuple[Companion, ...]
    warnings: tuple[str, ...]

    @property
    def kept(self) -> tuple[WrittenTensor, ...]:
        """The tensors that will be written."""
        return tuple(tensor for tensors in self.files.values() for tensor in tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that will be written."""
        return sum(info.num_bytes for info in self.kept)

    @property
    def key_fates(self) -> list[Fate]:
        source = self.draft
        return key_fates(source.checkpoint.config, source.detection.format, self.config_json, self.format)

    @property
    def tensor_fates(self) -> list[Fate]:
        """The fate of every tensor of the source, by its stored name."""
        place = self.draft.checkpoint.stored_rows
        dropped = [replace(fate, source=place(fate.source).stored) for fate in self.dropped if fate.source is not None]
        return [*tensor_fates(self.draft, self.kept), *dropped]

    @property
    def file_fates(self) -> list[Fate]:
        """The fate of every file that is neither config nor weights."""
        return [*(item.fate for item in self.companions), *left_behind(self.draft, self.companions)]


def make_plan(draft: DraftCheckpoint, wish: Wish) -> Plan:
    """Plan a conversion, or refuse it.

    Raises:
        TensorMismatch, PairMismatch: the source is malformed, or was not made for the target.
        LossyConversion, UnsupportedError: something would be lost.
        UsageError: the target has to be named.
    """
    result = get_format(wish.to)
    draft.select_tensors()
    _refuse_doubt(draft, result)
    if wish.target is not None:
        check_pair(DraftSource(draft.config, draft.checkpoint), wish.target)
    warnings: list[str] = [*draft.reading.notes]
    companions = (
        *find_companions(draft),
        *find_mask(draft, result, warnings, allow_lossy=wish.allow_lossy),
    )
    dropped = tuple(dropped_tensors(draft, result, wish.target, warnings, allow_lossy=wish.allow_lossy))
    names = {fate.source for fate in dropped}
    in_order = sorted(draft.checkpoint.tensors.values(), key=lambda info: (str(info.file), info.begin))
    kept: list[WrittenTensor] = [info for info in in_order if info.name not in names]
    config = _result_config(draft, wish, result, names, warnings)
    if wish.normalise_taps and not is_normal(config):
        config, kept = _put_taps_in_order(config, kept, wish, warnings)
    carried = draft.reading.carried
    with naming_file(draft.checkpoint.config_path):
        check_serving(config, result)
        warnings += serving_warnings(config, carried, result)
        config = suit_engine(config, result)
        config_json = result.write_config(config, suit_carried(carried, result))
    return Plan(
        draft=draft,
        target=wish.target,
        format=result,
        config=config,
        config_json=config_json,
        files=assign_files(kept, wish.max_shard_bytes),
        dropped=dropped,
        companions=companions,
        warnings=tuple(warnings),
    )


def _refuse_doubt(draft: DraftCheckpoint, result: Format) -> None:
    """Refuse to write one of two contradicting values, or packed weights where no reader looks for them."""
    path = draft.checkpoint.config_path
    if draft.reading.has_doubtful_causality:
        raise UnsupportedError(
            f"{path}: is_causal and dflash_config.causal contradict each other, and the result can state one",
            hint="--causality causal is what NeMo Automodel's JetSpec recipe trains; otherwise --causality non-causal",
        )
    if draft.quantization is not None and result.name == "speculators" and draft.detection.format.name != result.name:
        raise LossyConversion(
            f"{path}: quantised weights ({draft.quantization}): speculators' readers have no place for their settings",
            hint="--to native, vllm and sglang copy them as they are",
        )


def _put_taps_in_order(
    config: DraftConfig, kept: list[WrittenTensor], wish: Wish, warnings: list[str]
) -> tuple[DraftConfig, list[WrittenTensor]]:
    at = next((at for at, info in enumerate(kept) if info.name == PROJECTION), None)
    projection = kept[at] if at is not None else None
    shape = (config.hidden_size, config.num_taps * config.feature_size)
    if at is None or not isinstance(projection, TensorInfo) or projection.shape != shape or projection.dtype in PACKED:
        raise UnsupportedError(f"{PROJECTION}: packed weights cannot be put in the order of the taps")
    normal = normalise_taps(config, projection, allow_rounding=wish.allow_lossy)
    warnings += [normal.warning] if normal.warning is not None else []
    return normal.config, [*kept[:at], normal.projection, *kept[at + 1 :]]


def _result_config(
    draft: DraftCheckpoint, wish: Wish, result: Format, dropped: set[str | None], warnings: list[str]
) -> DraftConfig:
    config = draft.config
    if wish.target is not None and config.num_target_layers is None:
        config = replace(config, num_target_layers=wish.target.config.num_layers)
    if HEAD in dropped:
        config = replace(config, draft_vocab_size=config.vocab_size)
    if "verifier" in result.unstated:
        config = replace(config, verifier=None)
    else:
        config = replace(config, verifier=_verifier(config, wish, warnings))
        _warn_of_mixed_layers(config, warnings)
    if "target_hidden_size" in result.unstated and config.feature_size == config.hidden_size:
        config = replace(config, target_hidden_size=None)
    if wish.allow_lossy:
        config = _without_scales(config, result, warnings)
    return config


def _verifier(config: DraftConfig, wish: Wish, warnings: list[str]) -> Verifier | None:
    """--verifier, else the name the source carries, else the hub id, else a local directory's name with a warning."""
    target = wish.target
    architectures = tuple(named_architectures(target.checkpoint.config)) if target is not None else ()
    carried = config.verifier
    if wish.verifier is not None:
        if not architectures and carried is not None:
            architectures = carried.architectures
        return Verifier(name_or_path=wish.verifier, architectures=architectures)
    if carried is not None:
        return Verifier(name_or_path=carried.name_or_path, architectures=architectures or carried.architectures)
    if target is None or wish.target_reference is None:
        return None
    reference = wish.target_reference
    if reference == TINY:
        return Verifier(name_or_path=TINY_TARGET_NAME, architectures=architectures)
    if is_hub_id(reference):
        return Verifier(name_or_path=reference.partition("@")[0], architectures=architectures)
    name = target.checkpoint.path.resolve().name
    warnings.append(f"the target is stored as {name!r}, its directory's name: vLLM wants ORG/REPO, see --verifier")
    return Verifier(name_or_path=name, architectures=architectures)


def _warn_of_mixed_layers(config: DraftConfig, warnings: list[str]) -> None:
    if config.is_causal is None:
        warnings.append(
            "sliding layers are causal and full layers are not: speculators reads the result so, vLLM 0.33 would make "
            "every layer causal; serve the native form there"
        )


def _without_scales(config: DraftConfig, result: Format, warnings: list[str]) -> DraftConfig:
    off = {key: value for key, value in SCALES_OFF.items() if key in result.unstated}
    lost = [key for key, value in off.items() if getattr(config, key) != value]
    if lost:
        warnings.append(f"scales are dropped ({', '.join(lost)}): the result embeds or weighs tokens differently")
    changes: Json = dict(off)
    return replace(config, **changes)
