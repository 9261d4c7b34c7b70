"""The base class of exports for other programs, and the registry of export formats."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from dflash_cli.acceptance.acceptance_report import Evaluation
from dflash_cli.comparing.stored_evaluation import StoredEvaluation, refuse_capped, refuse_without_draft
from dflash_cli.terminal.shown import MAX_ROWS, Shown
from dflash_runtime.checkpoint.stored.strict_json import loads
from dflash_runtime.phrases import shorten
from dflash_runtime.registry import Registry

PACKAGE = "dflash_cli.publishing.exports"
Thinking = Literal["on", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """A result to export, with facts that the result may lack: names on the hub, and whether the target was thinking.

    A format that `merges` adds its entry to the file `output`. `force` replaces an entry with another value.
    """

    stored: StoredEvaluation
    draft: str | None = None
    model: str | None = None
    thinking: Thinking | None = None
    output: Path | None = None
    force: bool = False

    @property
    def evaluation(self) -> Evaluation:
        return self.stored.evaluation


@dataclass(frozen=True, slots=True, repr=False)
class Exported(Shown):
    """The text of an export, and warnings about its use."""

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
    """A measured acceptance in the form of another program. `title` names the form.

    `merges` is true if an export adds its entry to an existing file. `options` are the fields of the command's request
    that the form can state.
    """

    title: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()
    merges: ClassVar[bool] = False

    def export(self, request: ExportPlan) -> Exported:
        """Return the result in this form.

        Raises:
            UsageError: steps did not verify all draft tokens, no draft model made them, or the result lacks a fact that
                the form needs.
        """
        refuse_without_draft(request.stored)
        refuse_capped(request.stored)
        exported, foreign = self._export(request), request.evaluation.prompts.warning
        return exported if foreign is None else Exported(exported.text, (foreign, *exported.warnings))

    @abstractmethod
    def _export(self, request: ExportPlan) -> Exported: ...


EXPORTS: Registry[type[ExportFormat]] = Registry("export format")


def find_export(name: str) -> ExportFormat:
    """Return the format with this name.

    Raises:
        UnsupportedError: the name is unknown.
    """
    EXPORTS.discover(PACKAGE)
    return EXPORTS[name]()


def method_of(evaluation: Evaluation) -> str:
    """Return the name that engines give the way of drafting. Results of earlier releases lack it."""
    return evaluation.measured.draft_method or "dflash"


def name_of(evaluation: Evaluation, role: str) -> str | None:
    """Return the name of the draft or target, without the path of a directory."""
    identity = {"draft": evaluation.measured.draft, "target": evaluation.measured.target}[role]
    name = identity.name if identity is not None else evaluation.settings.get(role)
    return None if name is None else str(name)


def template_options(evaluation: Evaluation) -> Mapping[str, Any]:
    """Return the options passed to the chat template; empty if none are known."""
    found = evaluation.settings.get("chat_template_kwargs")
    if isinstance(found, str):
        try:
            found = loads(found)
        except ValueError:
            return {}
    return found if isinstance(found, Mapping) else {}
