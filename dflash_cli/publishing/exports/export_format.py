"""What a format of exports is, and the registry that finds them."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from dflash_cli.acceptance.acceptance_report import Evaluation
from dflash_cli.comparing.stored_evaluation import StoredEvaluation, refuse_capped
from dflash_cli.terminal.shown import MAX_ROWS, Shown
from dflash_runtime.phrases import shorten
from dflash_runtime.registry import Registry

PACKAGE = "dflash_cli.publishing.exports"
Thinking = Literal["on", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """A result to be exported, and what it does not say: how the model is called, and whether it was thinking.

    `existing` is the text of the file that the export is written into, where it is there. With `force` what it says of
    the same is replaced.
    """

    stored: StoredEvaluation
    model: str | None = None
    thinking: Thinking | None = None
    existing: str | None = None
    force: bool = False

    @property
    def evaluation(self) -> Evaluation:
        return self.stored.evaluation


@dataclass(frozen=True, slots=True, repr=False)
class Exported(Shown):
    """The text of an export, and what its reader must not overlook."""

    text: str
    warnings: tuple[str, ...] = ()

    def summary(self) -> list[str]:
        lines = self.text.splitlines()
        rest = [f"... {len(lines) - MAX_ROWS} more lines in .text"] if len(lines) > MAX_ROWS else []
        return [*(shorten(line, 120) for line in lines[:MAX_ROWS]), *rest, *self.warnings]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportDocument:
    """Result of `dflash export`."""

    KIND: ClassVar[str] = "export"

    to: str
    output: Annotated[str | None, "the file that was written"]
    content: str
    warnings: tuple[str, ...]


class ExportFormat(ABC):
    """A form of a measured acceptance for one program; `title` is what people call it.

    `merges` says whether it adds to a file that is there.
    """

    title: ClassVar[str]
    merges: ClassVar[bool] = False

    def export(self, request: ExportPlan) -> Exported:
        """The result in this form.

        Raises:
            UsageError: steps did not verify all that was drafted, or the result does not say what the form needs.
        """
        refuse_capped(request.stored)
        exported, foreign = self._export(request), request.evaluation.prompts.warning
        return exported if foreign is None else Exported(exported.text, (foreign, *exported.warnings))

    @abstractmethod
    def _export(self, request: ExportPlan) -> Exported: ...


EXPORTS: Registry[type[ExportFormat]] = Registry("export format")


def find_export(name: str) -> ExportFormat:
    """The format of a name.

    Raises:
        UnsupportedError: none has it.
    """
    EXPORTS.discover(PACKAGE)
    return EXPORTS[name]()


def name_of(evaluation: Evaluation, role: str) -> str | None:
    """What a draft or target is called, without a path of the machine it was measured on."""
    identity = {"draft": evaluation.measured.draft, "target": evaluation.measured.target}[role]
    name = identity.name if identity is not None else evaluation.settings.get(role)
    return None if name is None else str(name)


def template_options(evaluation: Evaluation) -> Mapping[str, Any]:
    """What was passed to the chat template; empty where nothing was, or it is not known."""
    found = evaluation.settings.get("chat_template_kwargs")
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError:
            return {}
    return found if isinstance(found, Mapping) else {}
