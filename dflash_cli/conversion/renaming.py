"""Plan a conversion that changes only names: of tensors, keys and the architecture. Tensor bytes stay the same."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_cli.checkpoints.byte_comparison import same_bytes
from dflash_cli.conversion.byte_progress import Progress
from dflash_cli.conversion.changes import Change, flatten
from dflash_cli.conversion.result_plan import ResultPlan
from dflash_cli.conversion.side_files import MASK_PICKLE, KindDraft, copied_files
from dflash_cli.conversion.spec import ConversionSpec
from dflash_cli.conversion.tensor_selection import assign_files
from dflash_cli.formats.detection import Detection, detect_from
from dflash_cli.formats.dialect import Json, get_writable, named_architectures
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.draft_kinds.kind_reading import CONTAINER, KindReading
from dflash_cli.formats.draft_kinds.renamed import renamed_config, renamed_tensor
from dflash_cli.formats.draft_kinds.table import Renaming
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.stored.files import MASK_FILE, Checkpoint
from dflash_runtime.errors import CheckpointError, GateFailed, UnsupportedError, naming_file

CONTAINERS = (CONTAINER, "dflash_config", "eagle_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class RenamingPlan(ResultPlan):
    """The plan of a result that differs from its source only in names."""

    draft: KindDraft
    renamed: tuple[Change, ...]

    @property
    def key_changes(self) -> list[Change]:
        before = flatten(self.draft.checkpoint.config, CONTAINERS)
        after = flatten(self.config_json, CONTAINERS)
        changes = [
            Change(key, key, "kept" if after[key] == value else "derived")
            for key, value in before.items()
            if key in after
        ]
        gone = [key for key in before if key not in after]
        new = [key for key in after if key not in before]
        for key in gone:
            to = next((item for item in new if item.rpartition(".")[2] == key.rpartition(".")[2]), None)
            if to is not None:
                new.remove(to)
            changes.append(
                Change(key, to, "moved" if to else "dropped", "" if to else "the result states it otherwise")
            )
        return [*changes, *(Change(None, key, "derived") for key in new)]

    @property
    def tensor_changes(self) -> tuple[Change, ...]:
        return self.renamed

    def verify(self, directory: Path, progress: Progress) -> None:
        """Read the written result back.

        Raises:
            GateFailed: a setting or a tensor differs from the plan.
        """
        written = Checkpoint(directory)
        if written.config != self.config_json or set(written.tensors) != {info.name for info in self.kept}:
            raise GateFailed("the result does not read back as planned", id="result-differs", field="tensors")

        def advance(count: int) -> None:
            progress("verify", count, self.num_bytes)

        for info in self.kept:
            copy = written.tensors[info.name]
            if (copy.dtype, copy.shape) != (info.dtype, info.shape) or not same_bytes(info, copy, advance):
                text = f"{info.name}: the result's bytes are not the source's"
                raise GateFailed(text, id="result-differs", field=info.name)


def plan_renaming(checkpoint: Checkpoint, detection: Detection, spec: ConversionSpec) -> RenamingPlan:
    """Plan a conversion of a draft of another kind, or refuse it. Writes nothing.

    Raises:
        CheckpointError: the draft does not fit its kind.
        UnsupportedError: the kind has no such names, or the draft has a part that they cannot state.
        UsageError: the result names the target, and its name is not known.
        LossyConversion: the result cannot state a setting.
    """
    kind = detection.format
    assert isinstance(kind, Kind)
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    reading = KindReading(kind, checkpoint.config, shapes)
    renaming = _find(reading, spec.to, checkpoint.config_path)
    _refuse_faulty(reading, checkpoint)
    for name in (MASK_PICKLE, MASK_FILE):
        if (checkpoint.path / name).exists():
            text = "a learned mask embedding, which is not renamed"
            raise UnsupportedError(text, id="mask-embedding", path=checkpoint.path / name)
    in_order = sorted(checkpoint.tensors.values(), key=lambda info: (str(info.file), info.begin))
    tensors = [replace(info, name=renamed_tensor(info.name, renaming)) for info in in_order]
    config = renamed_config(reading, renaming, _verifier(spec))
    draft = KindDraft(checkpoint, detection)
    result = detect_from(config, frozenset(info.name for info in tensors), checkpoint.config_path).format
    if isinstance(result, Kind):
        _refuse_changed(reading, KindReading(result, config, {info.name: info.shape for info in tensors}))
    else:
        config = _with_target(config, checkpoint.config, spec.target)
        with naming_file(checkpoint.config_path):
            result.read_config(config, checkpoint.config_path)
    changes = [
        Change(old.name, new.name, "kept" if old.name == new.name else "renamed")
        for old, new in zip(in_order, tensors, strict=True)
    ]
    return RenamingPlan(
        draft=draft,
        spec=spec,
        format=get_writable(spec.to) if isinstance(result, Kind) else result,
        config_json=config,
        files=assign_files(tensors, spec.max_shard_bytes),
        renamed=tuple(changes),
        side_files=tuple(copied_files(draft)),
    )


def _with_target(config: Json, source: Mapping[str, Any], target: TargetSource | None) -> Json:
    """The config of a draft of a dialect, with the facts of the target that the source does not state."""
    if target is None:
        return config
    facts = {"num_target_layers": target.facts.num_layers, "vocab_size": target.facts.vocab_size}
    return {**config, **{key: value for key, value in facts.items() if source.get(key) is None}}


def _find(reading: KindReading, to: str, path: Path) -> Renaming:
    """The renaming, or the refusal."""
    found = reading.renaming(to)
    if found is not None:
        return found
    kind = reading.kind
    of_target = [item for item in kind.renamings if item.to == to and item.since in (None, reading.variant)]
    reason = next(
        (f"it cannot state {text}" for item in of_target for text in kind.outside(item.demands, reading.values)),
        "it has these names already" if of_target else _reason(kind),
    )
    words = sorted({item.to for item in kind.renamings if reading.renaming(item.to) is not None})
    raise UnsupportedError(
        f"{kind.title} drafts are not converted to {to}: {reason}",
        id="kind-not-renamed",
        path=path,
        field="--to",
        found=to,
        hint=f"--to {' or '.join(words)}" if words else "dflash inspect describes the draft and names its engines",
    )


def _reason(kind: Kind) -> str:
    return f"no names of {kind.title} drafts are known for it" if kind.renamings else kind.why_not_renamed


def _refuse_faulty(reading: KindReading, checkpoint: Checkpoint) -> None:
    """Refuse a draft that does not fit its kind."""
    faults = [f"{fault.key}: {fault.text}" for fault in reading.wrong]
    if reading.is_listed:
        faults += [f"{name}: missing" for name in reading.missing]
        faults += [f"{name}: found {list(found)}" for name, (found, _) in reading.misshapen.items()]
    if faults:
        raise CheckpointError(
            f"not a sound {reading.kind.title} draft: {faults[0]}"
            + (f" and {len(faults) - 1} more" if faults[1:] else ""),
            id="kind-malformed",
            path=checkpoint.path,
            hint=f"dflash validate {checkpoint.path} # lists every fault",
        )


def _refuse_changed(before: KindReading, after: KindReading) -> None:
    """Require that the result has the same settings.

    Raises:
        GateFailed: a setting has another value, or is not read any more.
    """
    for size, value in before.values.items():
        if size in after.values and value is not None and after.values[size] != value:
            text = f"the result would state another {size}"
            raise GateFailed(text, id="result-differs", field=size, found=after.values[size], expected=repr(value))
    for size, (key, name, _) in before.stated.items():
        if key.only is None and size not in after.stated and size not in after.values:
            raise GateFailed(f"the result would not state {name}", id="result-differs", field=key.names[0])


def _verifier(spec: ConversionSpec) -> Json | None:
    """The name and the architectures of the target, None if the user does not name it."""
    name = spec.verifier or spec.target_reference
    if name is None:
        return None
    architectures = named_architectures(spec.target.checkpoint.config) if spec.target is not None else []
    return {"name_or_path": name, "architectures": architectures}
