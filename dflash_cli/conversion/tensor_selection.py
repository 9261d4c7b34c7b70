"""Choose the tensors that a conversion copies, the files that hold them, and the tensors that it drops."""

from collections.abc import Iterator, Sequence

from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.checkpoints.safetensors_writer import MadeTensor, WrittenTensor
from dflash_cli.checkpoints.target_copies import find_difference, is_identity_map
from dflash_cli.conversion.changes import Change
from dflash_cli.conversion.fp8_tensors import BLOCK, SCALE_END
from dflash_cli.conversion.side_files import ALLOW_HINT
from dflash_cli.formats.dialect import Format, word_of, writable_formats
from dflash_runtime.checkpoint.layout import DRAFT_TO_TARGET, EMBEDDING, HEAD, TARGET_TO_DRAFT
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.quantised.scaled_weights import E4M3
from dflash_runtime.checkpoint.stored.files import SINGLE_FILE
from dflash_runtime.errors import LossyConversion, UnsupportedError
from dflash_runtime.notices import Notice


def drop_tensors(
    draft: DraftCheckpoint, skipped: Sequence[str], result: Format, target: TargetSource | None, *, allow_lossy: bool
) -> tuple[list[Change], list[Notice]]:
    """The dropped tensors, each with the reason why that is safe, and warnings.

    `skipped` names the tensors that readers skip.

    Raises:
        LossyConversion: the result cannot hold a head or an embedding that differs from the target's.
        UnsupportedError: an id map contradicts the config.
    """
    names = draft.checkpoint.tensors
    is_full = not draft.config.has_reduced_vocab
    changes = [
        Change(name, None, "dropped", "readers compute it from the target or the config")
        for name in skipped
        if name.startswith("verifier_") or name.endswith("rotary_emb.inv_freq")
    ]
    maps = [name for name in (DRAFT_TO_TARGET, TARGET_TO_DRAFT) if name in names]
    for name in maps if is_full else ():
        if not is_identity_map(draft.checkpoint, name):
            text = f"{name} reorders ids although draft_vocab_size is the whole vocabulary"
            raise UnsupportedError(text, id="id-map-reorders", path=draft.checkpoint.path, field=name)
        changes.append(Change(name, None, "dropped", "maps every id to itself"))
    if result.keeps_head or draft.config.has_own_width:  # dialects without a head cannot state the width
        return changes, []
    warnings: list[Notice] = []
    if HEAD in names or not is_full:
        changes.append(_drop_copy(draft, result, target, HEAD))
    if not is_full:
        changes += [Change(name, None, "dropped", "the result has no reduced vocabulary") for name in maps]
        warnings.append(_drop_reduced(draft, result, allow_lossy=allow_lossy))
    if EMBEDDING in names:
        change, warned = _drop_embedding(draft, result, target, allow_lossy=allow_lossy)
        changes.append(change)
        warnings += warned
    return changes, warnings


def keep_tensors(draft: DraftCheckpoint, dropped: Sequence[Change]) -> list[WrittenTensor]:
    """The tensors that are copied, in the order of the source's files."""
    names = {change.from_ for change in dropped}
    in_order = sorted(draft.checkpoint.tensors.values(), key=lambda info: (str(info.file), info.begin))
    return [info for info in in_order if info.name not in names]


def tensor_changes(draft: DraftCheckpoint, kept: Sequence[WrittenTensor], result: Format) -> Iterator[Change]:
    """The change of each copied tensor, by its names in the files."""
    for tensor in kept:
        in_result = result.name_in_file(tensor.name)
        if isinstance(tensor, MadeTensor) and (tensor.dtype == E4M3 or tensor.name.endswith(SCALE_END)):
            yield _rounded_change(draft, tensor)
            continue
        if isinstance(tensor, MadeTensor) and tensor.name == TARGET_TO_DRAFT:
            source = tensor.name if tensor.name in draft.checkpoint.tensors else None
            yield Change(source, tensor.name, "derived", f"follows from {DRAFT_TO_TARGET}")
            continue
        stored, name = draft.checkpoint.stored_rows(tensor.name), draft.checkpoint.name_in_file(tensor.name)
        if isinstance(tensor, MadeTensor):
            why = tensor.why or "its columns are reordered to match the sorted tapped layers"
            yield Change(name, in_result, "derived", why)
        elif stored.rows is not None:
            begin, end = stored.rows
            yield Change(name, in_result, "split", f"rows {begin} to {end - 1} of a fused projection")
        else:
            yield Change(name, in_result, "kept" if name == in_result else "renamed")


def _rounded_change(draft: DraftCheckpoint, tensor: MadeTensor) -> Change:
    """The change of a matrix in FP8, or of its scales."""
    source = tensor.name.removesuffix(SCALE_END)
    scales = f"the scales of {source}, one per block of {BLOCK} x {BLOCK}"
    why = "its numbers in FP8" if tensor.dtype == E4M3 else scales
    if source not in draft.checkpoint.tensors:
        return Change(None, tensor.name, "derived", f"{why}; made from the target's head")
    return Change(draft.checkpoint.stored_rows(source).stored, tensor.name, "derived", why)


def assign_files(tensors: Sequence[WrittenTensor], max_bytes: int | None) -> dict[str, tuple[WrittenTensor, ...]]:
    """The tensors of each file of the result. None for `max_bytes` keeps the source's division into files.

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


def _drop_copy(draft: DraftCheckpoint, result: Format, target: TargetSource | None, name: str) -> Change:
    """The change that drops a tensor that equals the target's, or the refusal to drop it."""
    path = draft.checkpoint.path
    if target is None:
        raise LossyConversion(
            f"{name} can be dropped only if it equals the target's rows, and no target is given",
            id="copy-not-compared",
            path=path,
            field=name,
            hint="pass --target TARGET to compare them",
        )
    difference = find_difference(draft, name, target)
    if difference is not None:
        raise LossyConversion(
            f"{name} cannot be dropped: {difference}",
            id="copy-differs",
            path=path,
            field=name,
            found=difference,
            hint=f"{result.title} cannot hold it; --to {_keepers(result.family)} can",
        )
    return Change(name, None, "dropped", "equals the target's rows bit for bit")


def _drop_reduced(draft: DraftCheckpoint, result: Format, *, allow_lossy: bool) -> Notice:
    """The warning that a reduced vocabulary is dropped, or the refusal to drop it."""
    config = draft.config
    if not allow_lossy:
        raise LossyConversion(
            f"the draft proposes {config.draft_vocab_size} of {config.vocab_size} ids, and {result.title} cannot state "
            f"which: the converted draft would propose other tokens",
            id="reduced-vocabulary",
            path=draft.checkpoint.config_path,
            field="draft_vocab_size",
            found=config.draft_vocab_size,
            hint=f"--to {_keepers(result.family)} keeps it; {ALLOW_HINT}",
        )
    text = (
        f"the reduced head ({config.draft_vocab_size} of {config.vocab_size} ids) equals the target's rows and is "
        f"dropped: the converted draft proposes over the whole vocabulary, so its proposals change"
    )
    return Notice(text, id="reduced-head-dropped")


def _keepers(family: str) -> str:
    """The dialects of a draft family that hold a head, as a choice of options."""
    return " or ".join(word_of(item) for item in writable_formats(family) if item.keeps_head)


def _drop_embedding(
    draft: DraftCheckpoint, result: Format, target: TargetSource | None, *, allow_lossy: bool
) -> tuple[Change, list[Notice]]:
    if allow_lossy:
        text = f"{EMBEDDING} is dropped: readers use the target's, which was not compared with it"
        warnings = [Notice(text, id="embedding-not-compared")]
        return Change(EMBEDDING, None, "dropped", "readers use the target's (--allow-lossy)"), warnings
    try:
        return _drop_copy(draft, result, target, EMBEDDING), []
    except LossyConversion as error:
        error.hint = f"{error.hint}; {ALLOW_HINT}"
        raise
