"""Write a corrected copy of a draft: correct the keys whose right value is beyond doubt, convert, validate again.

The conversion itself corrects whatever it writes anew, such as a key that must stand in two places, names of tensors
and windows without effect. What only the trainer can know is left as it is and listed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import open_checkpoint
from dflash_cli.conversion.destination import check_destination
from dflash_cli.conversion.execute import convert_draft
from dflash_cli.conversion.plan import plan_conversion
from dflash_cli.conversion.request import ConversionSpec
from dflash_cli.engines.serving_engine import ServingEngine
from dflash_cli.formats.dialect import COMMON, Format
from dflash_cli.formats.fields import with_keys
from dflash_cli.rules.report import Report
from dflash_cli.rules.report_document import RepairEntry
from dflash_cli.rules.validator import ValidationPlan, validate_draft
from dflash_runtime.errors import CheckpointError, UnsupportedError, UsageError


@dataclass(frozen=True, slots=True)
class Repaired:
    """A corrected copy. `fixed` are the ids of rules that it no longer breaks, `after` is the report on it."""

    destination: Path
    dialect: str
    fixed: tuple[str, ...]
    after: Report

    @property
    def entry(self) -> RepairEntry:
        """The copy as a part of the document of `dflash validate`."""
        return RepairEntry(
            destination=str(self.destination), dialect=self.dialect, fixed=self.fixed, left=self.after.findings
        )


def repair_draft(request: ValidationPlan, before: Report, destination: Path, *, force: bool = False) -> Repaired | None:
    """Write the copy and validate it as the original was; None, with nothing written, where no finding asks for one.

    Raises:
        UsageError: the destination exists, or the draft is not local.
        CheckpointError: the draft cannot be read even with the keys mended.
        UnsupportedError: the copy would lose something.
    """
    if not isinstance(request.draft, Path):
        raise UsageError("--fix-out needs the whole draft, not only its headers")
    mendable = [item for item in before.findings if item.level != "run" and not item.is_about_training]
    if not mendable:
        return None
    check_destination(destination, force=force)
    checkpoint = open_checkpoint(request.draft)
    repairs = {key: value for finding in before.findings for key, value in finding.repair.items()}
    checkpoint.config = with_keys(checkpoint.config, repairs)
    try:
        draft = open_draft(checkpoint)
    except (CheckpointError, UnsupportedError) as error:
        raise type_of(error)(f"{error.message}; only whoever trained the draft can correct this") from error
    engines = [engine for engine in request.engines if isinstance(engine, ServingEngine)]
    dialect = choose_dialect(engines, draft.detection.format)
    target = open_target(open_checkpoint(request.target)) if isinstance(request.target, Path) else None
    conversion = ConversionSpec(to=dialect, target=target, target_reference=request.target_reference)
    convert_draft(plan_conversion(draft, conversion), destination, force=force)
    after = validate_draft(replace(request, draft=destination, draft_reference=str(destination)))
    left = {item.id for item in after.findings}
    fixed = dict.fromkeys(item.id for item in mendable if item.id not in left)
    return Repaired(destination, dialect, tuple(fixed), after)


def choose_dialect(engines: Sequence[ServingEngine], own: Format) -> str:
    """The dialect that suits every engine that is named, which is that of the strictest; otherwise the draft's own."""
    strictest = max(engines, key=lambda engine: engine.strictness, default=None)
    if strictest is not None and own.name not in strictest.serves_as_is:
        return strictest.dialect
    return own.name if own.writable else COMMON


def type_of(error: CheckpointError | UnsupportedError) -> type[CheckpointError] | type[UnsupportedError]:
    """The plain class of an error, whose constructor takes a message."""
    return CheckpointError if isinstance(error, CheckpointError) else UnsupportedError
