"""Options that several commands share, written once."""

from typing import Annotated, Literal

import typer

DraftArg = Annotated[str, typer.Argument(metavar="DRAFT", help="Draft: a directory, org/repo[@rev], or tiny.")]
DraftOption = Annotated[
    str | None,
    typer.Option("--draft", "-d", metavar="REF", help="Draft: a directory, org/repo[@rev], tiny or tiny:reduced."),
]
TargetOption = Annotated[
    str | None,
    typer.Option("--target", "-t", metavar="REF", help="Target: a directory, org/repo[@rev], or tiny."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
DType = Literal["auto", "float32", "bfloat16", "float64"]
DTypeOption = Annotated[
    DType, typer.Option("--dtype", help="Arithmetic; auto is bfloat16 on a GPU and float32 on the CPU.")
]
DeviceOption = Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")]
KOption = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        "-k",
        min=0,
        metavar="K",
        help="Tokens to draft a step; the draft sees K + 1 rows. Default: the trained block minus one. 0 decodes plainly.",
        show_default=False,
    ),
]
