"""Write a corrected copy of a draft: mend the keys whose right value is beyond doubt, then convert, then look again.

What a conversion states anew by itself (both homes of a key, names of tensors, windows that take effect) is mended by
it; what only a trainer can know is left and listed.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import open_checkpoint
from dflash_cli.conversion.execute import convert_draft
from dflash_cli.conversion.plan import plan_conversion
from dflash_cli.conversion.request import ConversionRequest
from dflash_cli.conversion.write import check_destination
from dflash_cli.formats.dialect import get_format
from dflash_cli.validation.rule import REMOVED, Finding
from dflash_cli.validation.validator import Question, Report, validate_draft
from dflash_runtime.errors import CheckpointError, UnsupportedError, UsageError


@dataclass(frozen=True, slots=True)
class Repaired:
    """A corrected copy. `fixed` are ids that are gone, `after` is the report on the copy."""

    destination: Path
    dialect: str
    fixed: tuple[str, ...]
    after: Report

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "destination": str(self.destination),
            "dialect": self.dialect,
            "fixed": list(self.fixed),
            "left": [item.document() for item in self.after.findings],
        }


def repair_draft(question: Question, before: Report, destination: Path, *, force: bool = False) -> Repaired:
    """Write the copy and validate it as the original was.

    Raises:
        UsageError: the destination exists, or the draft is not local.
        CheckpointError: the draft cannot be read even with the keys mended.
        UnsupportedError: the copy would lose something.
    """
    if not isinstance(question.draft, Path):
        raise UsageError("--fix-out needs the whole draft, not its headers alone")
    check_destination(destination, force=force)
    checkpoint = open_checkpoint(question.draft)
    checkpoint.config = mend(checkpoint.config, before.findings)
    try:
        draft = open_draft(checkpoint)
    except (CheckpointError, UnsupportedError) as error:
        raise type_of(error)(f"{error.message}; this cannot be mended without knowing the draft") from error
    dialect = choose_dialect(question, draft.detection.format.name, is_writable=draft.detection.format.writable)
    target = open_target(open_checkpoint(question.target)) if question.target is not None else None
    request = ConversionRequest(to=dialect, target=target, target_reference=question.target_reference)
    convert_draft(plan_conversion(draft, request), destination)
    level = "weights" if question.level == "run" else question.level
    after = validate_draft(replace(question, draft=destination, reference=str(destination), level=level, run=None))
    left = {item.id for item in after.findings}
    fixed = dict.fromkeys(item.id for item in before.findings if item.id not in left and item.id[0] != "R")
    return Repaired(destination, dialect, tuple(fixed), after)


def mend(config: Mapping[str, Any], findings: tuple[Finding, ...]) -> dict[str, Any]:
    """The config with every repair that the findings carry."""
    mended = copy.deepcopy(dict(config))
    for finding in findings:
        for place, value in finding.repair.items():
            *parents, key = place.split(".")
            container: Any = mended
            for parent in parents:
                container = container.setdefault(parent, {}) if isinstance(container, dict) else None
            if not isinstance(container, dict):
                continue
            if value is REMOVED:
                container.pop(key, None)
            else:
                container[key] = value
    return mended


def choose_dialect(question: Question, own: str, *, is_writable: bool) -> str:
    """The dialect of the engines that are named: the strictest of them; otherwise the draft's own."""
    named = {engine.name for engine in question.engines}
    if "sglang" in named:
        return "sglang"
    if named & {"transformers", "llama.cpp"}:
        return "native"
    if "vllm" in named and own != "speculators":
        return "vllm"
    return own if is_writable and get_format(own).writable else "native"


def type_of(error: CheckpointError | UnsupportedError) -> type[CheckpointError] | type[UnsupportedError]:
    """The plain class of an error, whose constructor takes a message."""
    return CheckpointError if isinstance(error, CheckpointError) else UnsupportedError
