"""Decide a conversion before anything is written: the new config, which tensors go along, and what is refused."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_cli.conversion.fates import Fate, key_fates
from dflash_cli.conversion.proof import find_difference, is_identity_map
from dflash_cli.formats.base import Format, Json, get_format, named_architectures
from dflash_cli.loading import DraftCheckpoint
from dflash_cli.references import TINY, TINY_TARGET_NAME, is_hub_id
from dflash_runtime.checkpoint import TensorInfo, refuse_escape
from dflash_runtime.config import DraftConfig, Verifier
from dflash_runtime.errors import LossyConversion, UnsupportedError, located
from dflash_runtime.layout import DRAFT_TO_TARGET, EMBEDDING, HEAD, TARGET_TO_DRAFT
from dflash_runtime.pair import TargetSource, check_pair

MASK_EMBEDDING = "mask_embedding.pt"
COPIED = ("README*", "LICENSE*", "LICENCE*", "NOTICE*")
ALLOW_HINT = "--allow-lossy converts without it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user asked for. `target_reference` is the target as it was typed."""

    to: str
    target: TargetSource | None = None
    target_reference: str | None = None
    verifier: str | None = None
    allow_lossy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that will be written, and why."""

    draft: DraftCheckpoint
    target: TargetSource | None
    format: Format
    config: DraftConfig
    config_json: Json
    kept: tuple[TensorInfo, ...]
    dropped: tuple[Fate, ...]
    files: tuple[Path, ...]
    warnings: tuple[str, ...]

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
        return [*(Fate(info.name, info.name, "kept") for info in self.kept), *self.dropped]


def make_plan(draft: DraftCheckpoint, wish: Wish) -> Plan:
    """Plan a conversion, or refuse it.

    Raises:
        TensorMismatch, PairMismatch: the source is malformed, or was not made for the target.
        LossyConversion, UnsupportedError: something would be lost.
        UsageError: the target has to be named.
    """
    result = get_format(wish.to)
    draft.plan()
    if wish.target is not None:
        check_pair(draft.source, wish.target)
    warnings: list[str] = [*draft.reading.notes]
    _refuse_mask_embedding(draft, wish, warnings)
    dropped = tuple(_dropped_tensors(draft, wish, warnings))
    names = {fate.source for fate in dropped}
    config = _result_config(draft, wish, result, names, warnings)
    with located(draft.checkpoint.config_path):
        config_json = result.write_config(config, draft.reading.carried)
    return Plan(
        draft=draft,
        target=wish.target,
        format=result,
        config=config,
        config_json=config_json,
        kept=tuple(info for name, info in draft.checkpoint.tensors.items() if name not in names),
        dropped=dropped,
        files=_companions(draft.checkpoint.path),
        warnings=tuple(warnings),
    )


def _refuse_mask_embedding(draft: DraftCheckpoint, wish: Wish, warnings: list[str]) -> None:
    if not (draft.checkpoint.path / MASK_EMBEDDING).exists():
        return
    message = f"{draft.checkpoint.path / MASK_EMBEDDING}: a learned mask embedding, which would be lost"
    if not wish.allow_lossy:
        raise UnsupportedError(message, hint=ALLOW_HINT)
    warnings.append(f"{MASK_EMBEDDING} is left behind: the result embeds its mask differently")


def _dropped_tensors(draft: DraftCheckpoint, wish: Wish, warnings: list[str]) -> Iterator[Fate]:
    """The tensors that do not go along, each with the reason that makes it safe."""
    names = draft.checkpoint.tensors
    is_full = not draft.config.has_reduced_vocab
    for name in names:
        if name.startswith("verifier_") or name.endswith("rotary_emb.inv_freq"):
            yield Fate(name, None, "dropped", "not the draft's: readers make it from the target or the config")
    maps = [name for name in (DRAFT_TO_TARGET, TARGET_TO_DRAFT) if name in names]
    if is_full and maps:
        yield from _drop_identity_maps(draft, maps)
    if wish.to == "speculators":
        return
    if not is_full:
        yield from _drop_reduced_head(draft, wish, warnings, maps)
    elif HEAD in names:
        yield _drop_copy(draft, wish, HEAD)
    if EMBEDDING in names:
        yield _drop_embedding(draft, wish, warnings)


def _drop_identity_maps(draft: DraftCheckpoint, maps: list[str]) -> Iterator[Fate]:
    for name in maps:
        if not is_identity_map(draft.checkpoint, name):
            raise UnsupportedError(
                f"{draft.checkpoint.path}: {name} reorders ids although draft_vocab_size is the whole vocabulary"
            )
        yield Fate(name, None, "dropped", "maps every id to itself")


def _drop_reduced_head(draft: DraftCheckpoint, wish: Wish, warnings: list[str], maps: list[str]) -> Iterator[Fate]:
    yield _drop_copy(draft, wish, HEAD)
    for name in maps:
        yield Fate(name, None, "dropped", "there is no reduced vocabulary any more")
    config = draft.config
    warnings.append(
        f"the reduced head ({config.draft_vocab_size} of {config.vocab_size} ids) equals the target's rows and is "
        f"dropped: the result proposes over the whole vocabulary, so what is drafted changes"
    )


def _drop_copy(draft: DraftCheckpoint, wish: Wish, name: str) -> Fate:
    path = draft.checkpoint.path
    if wish.target is None:
        raise LossyConversion(
            f"{path}: {name} can be dropped only if it equals the target's rows, and no target is given",
            hint="pass --target REF to compare them",
        )
    difference = find_difference(draft, name, wish.target)
    if difference is not None:
        raise LossyConversion(
            f"{path}: {name} cannot be dropped: {difference}",
            hint="a head of its own has no place in the native dialect; keep the speculators form",
        )
    return Fate(name, None, "dropped", "equals the target's rows bit for bit")


def _drop_embedding(draft: DraftCheckpoint, wish: Wish, warnings: list[str]) -> Fate:
    if not wish.allow_lossy:
        try:
            return _drop_copy(draft, wish, EMBEDDING)
        except LossyConversion as error:
            raise LossyConversion(error.message, hint=f"{error.hint}; {ALLOW_HINT}") from error
    warnings.append(f"{EMBEDDING} is dropped: readers take the target's, and nothing compared the two")
    return Fate(EMBEDDING, None, "dropped", "readers take the target's (--allow-lossy)")


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
    if wish.allow_lossy and "output_multiplier" in result.unstated:
        config = _without_scales(config, warnings)
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


def _without_scales(config: DraftConfig, warnings: list[str]) -> DraftConfig:
    plain = replace(config, input_embedding_scale=1.0, output_multiplier=1.0, final_logit_softcapping=None)
    if plain != config:
        warnings.append("scales are dropped: the result embeds or weighs tokens differently")
    return plain


def _companions(path: Path) -> tuple[Path, ...]:
    found = sorted({item for pattern in COPIED for item in path.glob(pattern) if item.is_file()})
    for item in found:
        refuse_escape(path, item)
    return tuple(found)
