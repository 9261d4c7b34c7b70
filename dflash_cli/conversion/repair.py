"""Write a corrected copy of a draft: apply the repairs of its findings, convert it, and validate the copy.

The conversion also corrects keys that belong in two places, names of tensors, and windows without effect. Faults that
only the trainer can correct stay and are listed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import open_checkpoint
from dflash_cli.conversion.destination import remove_checkpoint
from dflash_cli.conversion.execute import convert_draft
from dflash_cli.conversion.plan import plan_conversion
from dflash_cli.conversion.spec import ConversionSpec
from dflash_cli.engines.serving_engine import ServingEngine
from dflash_cli.formats.dialect import COMMON, Format, word_of
from dflash_cli.formats.fields import with_keys
from dflash_cli.rules.report import RepairEntry, Report
from dflash_cli.rules.rule import Finding
from dflash_cli.rules.subject import ValidationPlan
from dflash_cli.rules.validator import validate_draft
from dflash_runtime.errors import CheckpointError, UnsupportedError, UsageError


@dataclass(frozen=True, slots=True)
class Repaired:
    """A corrected copy. `fixed` lists the ids of rules that now hold, `after` is the report on the copy.

    `left` has the findings on the copy, and doubts about the training, which no copy can settle.
    """

    destination: Path
    dialect: str
    fixed: tuple[str, ...]
    after: Report
    left: tuple[Finding, ...]

    @property
    def entry(self) -> RepairEntry:
        """The copy as a part of the document of `dflash validate`."""
        return RepairEntry(destination=str(self.destination), dialect=self.dialect, fixed=self.fixed, left=self.left)


def repair_draft(request: ValidationPlan, before: Report, destination: Path, *, force: bool = False) -> Repaired | None:
    """Write a corrected copy and validate it like the original. If nothing can be corrected, write nothing: None.

    Raises:
        UsageError: the destination exists, or the draft is not local.
        CheckpointError, UnsupportedError: the draft cannot be read even with the repairs.
        LossyConversion: the copy would lose a part of the draft.
    """
    if not isinstance(request.draft, Path):
        raise UsageError(
            "--fix-out needs the whole draft, not only its headers", id="draft-not-local", field="--fix-out"
        )
    mendable = [item for item in before.findings if item.level != "run" and not item.is_about_training]
    if not mendable:
        return None
    checkpoint = open_checkpoint(request.draft)
    repairs = {key: value for finding in before.findings for key, value in finding.repair.items()}
    checkpoint.config = with_keys(checkpoint.config, repairs)
    try:
        draft = open_draft(checkpoint)
    except (CheckpointError, UnsupportedError) as error:
        kind = CheckpointError if isinstance(error, CheckpointError) else UnsupportedError
        raise kind(
            f"{error.message}; only the trainer of the draft can correct this", id="not-repairable", field=error.field
        ) from error
    engines = [engine for engine in request.engines if isinstance(engine, ServingEngine)]
    dialect = choose_dialect(engines, draft.detection.format)
    target = open_target(open_checkpoint(request.target)) if isinstance(request.target, Path) else None
    conversion = ConversionSpec(to=dialect, target=target, target_reference=request.target_reference, is_repair=True)
    is_new = not destination.exists()
    convert_draft(plan_conversion(draft, conversion), destination, force=force)
    after = validate_draft(replace(request, draft=destination, draft_reference=str(destination)))
    left = {item.id for item in after.findings}
    fixed = dict.fromkeys(item.id for item in mendable if item.id not in left)
    if not fixed and is_new:
        remove_checkpoint(destination)
        return None
    doubts = [item for item in before.findings if item.is_about_training and item.id not in left]
    return Repaired(destination, dialect, tuple(fixed), after, (*after.findings, *doubts))


def choose_dialect(engines: Sequence[ServingEngine], own: Format) -> str:
    """The dialect of the copy: the draft's own if the strictest engine serves it, else the dialect of that engine."""
    strictest = max(engines, key=lambda engine: engine.strictness, default=None)
    if strictest is not None and word_of(own) not in strictest.serves_as_is:
        return strictest.dialect
    return word_of(own) if own.writable else COMMON
