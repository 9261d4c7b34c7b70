"""Which tensors go along, which do not and what makes that safe, and into which files they go."""

from collections.abc import Iterator, Sequence

from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.checkpoints.safetensors_writer import MadeTensor, WrittenTensor
from dflash_cli.conversion.changes import Fate
from dflash_cli.conversion.target_copies import find_difference, is_identity_map
from dflash_cli.formats.dialect import Format
from dflash_runtime.checkpoint.files import SINGLE_FILE
from dflash_runtime.checkpoint.layout import DRAFT_TO_TARGET, EMBEDDING, HEAD, TARGET_TO_DRAFT
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.errors import LossyConversion, UnsupportedError

ALLOW_HINT = "--allow-lossy converts without it"


def dropped_tensors(
    draft: DraftCheckpoint, result: Format, target: TargetSource | None, warnings: list[str], *, allow_lossy: bool
) -> Iterator[Fate]:
    """The tensors that do not go along, each with the reason that makes it safe."""
    names = draft.checkpoint.tensors
    is_full = not draft.config.has_reduced_vocab
    for name in names:
        if name.startswith("verifier_") or name.endswith("rotary_emb.inv_freq"):
            yield Fate(name, None, "dropped", "not the draft's: readers make it from the target or the config")
    maps = [name for name in (DRAFT_TO_TARGET, TARGET_TO_DRAFT) if name in names]
    if is_full and maps:
        yield from _drop_identity_maps(draft, maps)
    if result.keeps_head:
        return
    if not is_full:
        yield from _drop_reduced_head(draft, target, warnings, maps)
    elif HEAD in names:
        yield _drop_copy(draft, target, HEAD)
    if EMBEDDING in names:
        yield _drop_embedding(draft, target, warnings, allow_lossy=allow_lossy)


def tensor_fates(draft: DraftCheckpoint, kept: Sequence[WrittenTensor]) -> Iterator[Fate]:
    """What became of each stored tensor that goes along."""
    for tensor in kept:
        place = draft.checkpoint.stored_rows(tensor.name)
        if isinstance(tensor, MadeTensor):
            yield Fate(place.stored, tensor.name, "derived", "its blocks are put in the order of the taps")
        elif place.rows is not None:
            begin, end = place.rows
            yield Fate(place.stored, tensor.name, "split", f"rows {begin} to {end - 1} of a fused projection")
        else:
            yield Fate(place.stored, tensor.name, "kept" if place.stored == tensor.name else "renamed")


def assign_files(tensors: Sequence[WrittenTensor], max_bytes: int | None) -> dict[str, tuple[WrittenTensor, ...]]:
    """The files of the result: those of the source, or as many as `max_bytes` asks for, under the usual names.

    A tensor larger than `max_bytes` has a file of its own.
    """
    groups: list[list[WrittenTensor]] = []
    if max_bytes is None:
        by_file: dict[str, list[WrittenTensor]] = {}
        for tensor in tensors:
            by_file.setdefault(str(tensor.file), []).append(tensor)
        groups = [by_file[name] for name in sorted(by_file)]
    else:
        size = 0
        for tensor in tensors:
            if not groups or size + tensor.num_bytes > max_bytes:
                groups.append([])
                size = 0
            groups[-1].append(tensor)
            size += tensor.num_bytes
    if len(groups) <= 1:
        return {SINGLE_FILE: tuple(tensors)}
    count = len(groups)
    return {f"model-{at:05d}-of-{count:05d}.safetensors": tuple(group) for at, group in enumerate(groups, start=1)}


def _drop_identity_maps(draft: DraftCheckpoint, maps: list[str]) -> Iterator[Fate]:
    for name in maps:
        if not is_identity_map(draft.checkpoint, name):
            raise UnsupportedError(
                f"{draft.checkpoint.path}: {name} reorders ids although draft_vocab_size is the whole vocabulary"
            )
        yield Fate(name, None, "dropped", "maps every id to itself")


def _drop_reduced_head(
    draft: DraftCheckpoint, target: TargetSource | None, warnings: list[str], maps: list[str]
) -> Iterator[Fate]:
    yield _drop_copy(draft, target, HEAD)
    for name in maps:
        yield Fate(name, None, "dropped", "there is no reduced vocabulary any more")
    config = draft.config
    warnings.append(
        f"the reduced head ({config.draft_vocab_size} of {config.vocab_size} ids) equals the target's rows and is "
        f"dropped: the result proposes over the whole vocabulary, so what is drafted changes"
    )


def _drop_copy(draft: DraftCheckpoint, target: TargetSource | None, name: str) -> Fate:
    path = draft.checkpoint.path
    if target is None:
        raise LossyConversion(
            f"{path}: {name} can be dropped only if it equals the target's rows, and no target is given",
            hint="pass --target REF to compare them",
        )
    difference = find_difference(draft, name, target)
    if difference is not None:
        raise LossyConversion(
            f"{path}: {name} cannot be dropped: {difference}",
            hint="a head of its own has no place in the native dialect; keep the speculators form, or --to vllm",
        )
    return Fate(name, None, "dropped", "equals the target's rows bit for bit")


def _drop_embedding(
    draft: DraftCheckpoint, target: TargetSource | None, warnings: list[str], *, allow_lossy: bool
) -> Fate:
    if not allow_lossy:
        try:
            return _drop_copy(draft, target, EMBEDDING)
        except LossyConversion as error:
            raise LossyConversion(error.message, hint=f"{error.hint}; {ALLOW_HINT}") from error
    warnings.append(f"{EMBEDDING} is dropped: readers take the target's, and nothing compared the two")
    return Fate(EMBEDDING, None, "dropped", "readers take the target's (--allow-lossy)")
