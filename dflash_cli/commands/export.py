"""`dflash export`: a measured acceptance in the form that another program takes."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dflash_cli.terminal import console
from dflash_cli.terminal.options import ForceOption, JsonOption

ResultArg = Annotated[Path, typer.Argument(metavar="RESULT", help="A file that eval-acceptance --json has written.")]
ToOption = Annotated[
    Literal["speculation-profile", "golden-al", "vllm-rates", "vllm-length", "sglang-length", "tensorrt-llm-length"],
    typer.Option(
        "--to",
        metavar="FORM",
        help="speculation-profile, which travels with a draft; golden-al, a table of lengths by model; or what makes "
        "an engine accept as measured: vllm-rates, vllm-length, sglang-length, tensorrt-llm-length.",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Write to FILE; golden-al adds to one that is there. Default: stdout."
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="NAME", help="The model's name in golden-al. Default: the target's.", show_default=False
    ),
]
ThinkingOption = Annotated[
    Literal["on", "off"] | None,
    typer.Option("--thinking", help="Whether the model was thinking, for golden-al.", show_default=False),
]


def export(
    result: ResultArg,
    to: ToOption,
    output: OutputOption = None,
    model: ModelOption = None,
    thinking: ThinkingOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a measured acceptance in the form that another program takes.

    Results of runs that did not verify every drafted token are refused: what the others give is not known.
    """
    from dflash_cli.comparing.stored_evaluation import read_evaluations
    from dflash_cli.documents.atomic_file import atomic_text, check_output
    from dflash_cli.publishing.exports.export_format import ExportRequest, find_export

    chosen = find_export(to)
    if output is not None:
        check_output(output, force=force or chosen.merges)
    has_file = output is not None and chosen.merges and output.is_file()
    exported = chosen.export(
        ExportRequest(
            stored=read_evaluations([result])[0],
            model=model,
            thinking=thinking,
            existing=output.read_text(encoding="utf-8") if output is not None and has_file else None,
            force=force,
        )
    )
    for text in exported.warnings:
        console.warn(text)
    if output is not None:
        with atomic_text(output) as stream:
            stream.write(exported.text)
    if as_json:
        document = {"to": to, "output": str(output) if output is not None else None, "content": exported.text}
        console.result_json(document | {"warnings": list(exported.warnings)})
    else:
        console.result(exported.text if output is None else f"{output}\n", end="")
