"""`dflash export`: write a measured acceptance in the form of another program."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from dflash_cli.terminal import console
from dflash_cli.terminal.options import ResultOptions, refuse_beside
from dflash_cli.terminal.parameters import ESSENTIALS, Option
from dflash_cli.terminal.requests import verb

if TYPE_CHECKING:
    from dflash_cli.publishing.exports.export_format import Exported


FACTS = frozenset({"draft_name", "target_name", "thinking"})
"""Options that state a fact which the result may lack."""


@dataclass(frozen=True, kw_only=True)
class ExportRequest(ResultOptions):
    """Write a measured acceptance in the form of another program.

    A result is refused if its run did not verify all draft tokens, because acceptance of the others is unknown.
    """

    to: Annotated[
        Literal[
            "speculation-profile", "golden-al", "vllm-rates", "vllm-length", "sglang-length", "tensorrt-llm-length"
        ],
        Option(
            metavar="FORM", group=ESSENTIALS,
            help="speculation-profile: travels with a draft. golden-al: a table of lengths by model. vllm-rates, "
            "vllm-length, sglang-length, tensorrt-llm-length: settings that make the engine accept as measured.",
        ),
    ]  # fmt: skip
    output: Annotated[
        Path | None,
        Option(
            is_per_run=True, short="-o", metavar="FILE", group=ESSENTIALS, is_setting=False,
            help="Write to FILE; golden-al adds to an existing file. Default: stdout.",
        ),
    ] = None  # fmt: skip
    draft_name: Annotated[
        str | None,
        Option(
            metavar="NAME", group=ESSENTIALS, help="Name of the draft in speculation-profile. Default: as measured."
        ),
    ] = None
    target_name: Annotated[
        str | None,
        Option(
            metavar="NAME", group=ESSENTIALS,
            help="Name of the target in speculation-profile and golden-al. Default: as measured.",
        ),
    ] = None  # fmt: skip
    thinking: Annotated[
        Literal["on", "off"] | None,
        Option(group=ESSENTIALS, help="For golden-al: whether the target was thinking. Default: as measured."),
    ] = None


@verb(ExportRequest)
def export(request: ExportRequest) -> "Exported":
    """Make the other program's form, and write it if `output` is given.

    Raises:
        CheckpointError: the file is malformed.
        UsageError: the form cannot express the result, or does not use a given option.
    """
    from dflash_cli.comparing.stored_evaluation import read_evaluations
    from dflash_cli.documents.atomic_file import atomic_text, check_output
    from dflash_cli.publishing.exports.export_format import ExportPlan, find_export

    chosen, output = find_export(request.to), request.output
    refuse_beside(request, sorted(FACTS - chosen.options), f"--to {request.to}, which does not use it")
    if output is not None:
        check_output(output, force=request.force or chosen.merges)
    exported = chosen.export(
        ExportPlan(
            stored=read_evaluations([request.result])[0],
            draft=request.draft_name,
            model=request.target_name,
            thinking=request.thinking,
            output=output,
            force=request.force,
        )
    )
    if output is not None:
        with atomic_text(output) as stream:
            stream.write(exported.text)
    return exported


def command(request: ExportRequest) -> None:
    """Export and print."""
    exported, output = export(request), request.output
    for text in exported.warnings:
        console.warn(text)
    if console.is_json():
        from dflash_cli.publishing.exports.export_format import ExportDocument

        file = str(output) if output is not None else None
        warnings = tuple(exported.warnings)
        console.result_json(ExportDocument(to=request.to, output=file, content=exported.text, warnings=warnings))
    else:
        console.result_text(exported.text if output is None else f"{output}\n")
